"""``bench kv keys``: formats as roundings of keys, their shares of the best keys, and the command at toy size."""

from __future__ import annotations

import pytest
import torch

from rorqual.attention.hadamard import hadamard
from rorqual.attention.indexer import Indexer
from rorqual.attention.kernels.index_query_torch import index_query
from rorqual.attention.kernels.indexer_logits_torch import indexer_logits
from rorqual.attention.kv.rows import FloatRows, Fp4IndexRows, Fp8IndexRows
from rorqual.launch import cli
from rorqual.launch.bench.kv.key_formats import SERVED, WEIGHED, kept, scores, shares
from rorqual.launch.bench.kv.key_inputs import made_up, of_tiny
from rorqual.launch.bench.results import read_results

BY_NAME = {form.name: form for form in (*SERVED, *WEIGHED)}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8", "fp4"])
def test_scores_are_those_of_the_fused_path(name):
    """What is weighed is what the engine's operations compute from the same keys and queries."""
    found = made_up(96, 3, seed=1)
    form = BY_NAME[name]
    stores = {"fp8": Fp8IndexRows, "fp4": Fp4IndexRows}
    if name in stores:
        store = stores[name](6, 16, 128, torch.float32, torch.device("cpu"))
    else:
        store = FloatRows(6, 16, 128, getattr(torch, name), torch.float32, torch.device("cpu"))
    store.write(torch.arange(96), hadamard(found.keys) if form.transform else found.keys)
    assert store.n_bytes == 96 * form.bytes
    turn = torch.zeros(3, 32, 2)
    turn[..., 0] = 1.0  # no rotation: made-up keys and queries are as after it
    queries = found.queries.bfloat16() if name == "bfloat16" else found.queries
    settings = {"interleaved": False, "rotate": form.transform, "fp8": form.transform, "scale": 1.0}
    queries, weights = index_query(queries, found.weights, turn, **settings)
    table, limit = torch.arange(6, dtype=torch.int32)[None], torch.full((3,), 96, dtype=torch.int32)
    places = {"page_size": 16, "max_context": 96, "max_query": 3}
    expected = indexer_logits(queries, weights, store.pool, table, torch.zeros(3, dtype=torch.int32), limit, **places)
    got = scores(form, found.queries, found.weights, found.keys)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_other_scales_are_what_they_are_called():
    keys = hadamard(made_up(200, 1, seed=2).keys)  # outliers are spread
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = keys.view(200, 4, 32)
    powers = BY_NAME["e2m1, scales are powers of two (MXFP4)"].keys(keys).view_as(blocks)
    for key, block in ((0, 0), (17, 3), (199, 2)):
        scale = torch.exp2(torch.ceil(torch.log2(blocks[key, block].abs().max() / 7)))
        units = powers[key, block].abs() / scale
        assert bool(torch.isin(units, grid).all()) and float(units.max()) in (4.0, 6.0)
    under = BY_NAME["e2m1, e4m3 scales under an fp32 one (as NVFP4)"].keys(keys).view_as(blocks)
    whole = blocks.abs().amax((1, 2)) / (6 * 448)
    scales = under.abs().amax(2) / 6 / whole[:, None]
    torch.testing.assert_close(scales.to(torch.float8_e4m3fn).float(), scales, rtol=1e-6, atol=0)
    errors = {name: float((form.keys(keys) - keys).norm() / keys.norm()) for name, form in BY_NAME.items()}
    assert errors["float32"] == 0 and errors["bfloat16"] < 0.002 < errors["fp8"] < 0.03
    assert all(0.08 < error < 0.16 for name, error in errors.items() if "e2m1" in name or name == "fp4")
    assert errors["fp4"] < min(error for name, error in errors.items() if "e2m1" in name)


def test_kept_counts_sets():
    true = torch.tensor([[5.0, 4.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert kept(true, true.flip(1), 2) == 0.0 and kept(true, true * 2, 2) == 100.0
    assert kept(true, torch.tensor([[5.0, 0.0, 6.0, 1.0], [0.0, 1.0, 2.0, 3.0]]), 2) == 75.0


def test_finer_formats_keep_more():
    found = made_up(4096, 8, seed=3)
    bf16, fp8, fp4 = shares(SERVED[1:], found.queries, found.weights, found.keys, 256)
    assert 99 < bf16 and 95 < fp8 < bf16 and 80 < fp4 < fp8


def test_keys_of_the_embedded_model_are_its_indexers_own():
    rotated = Indexer._rotated
    [layers] = of_tiny(260, 1)
    assert Indexer._rotated is rotated and len(layers) == 5
    for layer in layers:
        assert layer.keys.shape == (260, 64) and layer.queries.shape == (260, 4, 64) and layer.weights.shape == (260, 4)
        last = layer.last(250, 10)
        assert len(last.keys) == 241 and torch.equal(last.queries[-1], layer.queries[249])
        norm = layer.keys.norm(dim=1)  # a LayerNorm with gains, which RoPE keeps
        assert bool((norm > 1).all()) and float(norm.std() / norm.mean()) < 1
    assert shares(SERVED[3:], layers[2].queries[200:], layers[2].weights[200:], layers[2].keys, 64)[0] > 75


def test_the_command_writes_rows(tmp_path, capsys):
    words = ["bench", "kv", "keys", "--parts", "made-up", "--contexts", "2200", "--queries", "2", "--results-dir", str(tmp_path)]
    assert cli.main(words) == 0
    [path] = tmp_path.glob("kv-keys-cpu-*.json")
    rows = read_results(path).rows
    sizes = {row.params["format"]: row.value for row in rows if row.name.startswith("bytes")}
    assert (sizes["fp8"], sizes["fp4"]) == (132, 68)
    found = {row.params["format"]: row.value for row in rows if row.name == "best keys kept"}
    assert set(found) == set(sizes) - {"float32"} and all(50 < value <= 100 for value in found.values())
    assert "% of the 2048 best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"), [(["--contexts", "2048"], "above 2048"), (["--facts", "25"], "--facts must be from 1 to 24")]
)
def test_refusals(words, message, capsys):
    assert cli.main(["bench", "kv", "keys", "--parts", "made-up", *words]) == 2
    assert message in capsys.readouterr().err
