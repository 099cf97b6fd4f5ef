"""The sparse prefill kernels on a GPU, against the plain version evaluated in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import sparse_prefill_unpack
from rorqual.attention.kernels.sparse_attention_torch import evaluate
from rorqual.attention.kernels.sparse_prefill import Launch, sparse_attention
from rorqual.attention.kv.layout import encode_latent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BF16 = torch.bfloat16
LATENT, ROPE, SCALE = 512, 64, 0.1352
#: launches that compile one kernel each; the heads they are made for
KINDS = [(16, False), (16, True), (64, False), (64, True)]
TILE = Launch(kernel="tile", head_block=16, key_block=32)


def problem(tokens: int, heads: int, k: int, fp8: bool, n_rows: int = 4096) -> dict[str, Any]:
    """Rows in any order with absent ones among them, a token with one key, one without; unchosen rows hold NaN."""
    torch.manual_seed(tokens + heads + k)
    rows = torch.randint(0, n_rows, (tokens, k), device="cuda", dtype=torch.int32)
    rows[0, k // 2 :] = -1
    rows[0, 0], rows[0, -1] = -5, n_rows
    if tokens > 3:
        rows[1] = -1
        rows[2], rows[2, k // 3] = n_rows + 7, 11
    unused = torch.ones(n_rows, dtype=torch.bool, device="cuda")
    unused[rows[(rows >= 0) & (rows < n_rows)].long()] = False
    values = torch.randn(n_rows, LATENT + ROPE, device="cuda")
    pool = encode_latent(values, LATENT) if fp8 else values.to(BF16)
    pool[unused] = 255 if fp8 else float("nan")
    return {
        "q_latent": torch.randn(heads, tokens, LATENT, device="cuda", dtype=BF16).transpose(0, 1) * 0.5,
        "q_rope": torch.randn(tokens, heads, ROPE, device="cuda", dtype=BF16) * 0.5,
        "pool": pool,
        "rows": rows,
    }


def agree(given: dict[str, Any], launch: Launch | None = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sparse_attention(**given, scale=SCALE, launch=launch, **more)
    wanted, wanted_lse = evaluate(**given, scale=SCALE, sink=more.get("sink"), n_keys=more.get("n_keys"), compute=torch.float64)
    error = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    assert torch.isfinite(out).all() and error.max() <= 1e-2, f"relative error {error.max():.1e}"
    assert torch.equal(torch.isinf(lse), torch.isinf(wanted_lse))
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-2)
    assert (out[torch.isinf(wanted_lse)] == 0).all()
    return out, lse


@pytest.mark.parametrize(("heads", "fp8"), KINDS)
def test_equals_the_plain_version(heads, fp8):
    agree(problem(5, heads, 2048, fp8))


@pytest.mark.parametrize("k", [63, 65, 129])
def test_lengths(k):
    agree(problem(4, 16, k, False))


@pytest.mark.parametrize(("heads", "fp8"), [(16, True), (64, False)])
def test_sink_and_key_counts(heads, fp8):
    counts = torch.tensor([500, 0, 500, 1, 64, 65, 130], dtype=torch.int32, device="cuda")
    agree(problem(7, heads, 500, fp8), sink=torch.randn(heads, device="cuda"), n_keys=counts)


@pytest.mark.parametrize(("heads", "fp8"), [(8, False), (20, True), (128, False), (128, True)])
def test_other_numbers_of_heads(heads, fp8):
    agree(problem(4, heads, 320, fp8))


def test_the_general_kernel():
    agree(problem(4, 20, 200, True), launch=TILE)


@pytest.mark.parametrize("slots", [4096, 3])
@pytest.mark.parametrize("heads", [16, 64])
def test_rows_dequantised_once(heads, slots, monkeypatch):
    """Many tokens over FP8 rows: through a workspace, or, where that is too small, as ever."""
    monkeypatch.setattr(sparse_prefill_unpack, "_MOST", slots)
    agree(problem(257, heads, 2048, True))


@pytest.mark.parametrize("heads", [16, 64])
def test_scales_need_not_be_powers_of_two(heads):
    """With one key a token's output is the row itself: scales far apart show in full."""
    given = problem(4, heads, 64, True)
    given["rows"][:, 1:] = -1
    given["rows"][:, 0] = torch.arange(4, device="cuda")
    given["pool"][:4] = encode_latent(torch.randn(4, LATENT + ROPE, device="cuda"), LATENT)
    given["pool"].view(torch.float32)[:4, 128:132] = torch.logspace(-3, 3, 16, device="cuda").view(4, 4) * 1.37
    given["q_latent"] = given["q_latent"] * 1e-3
    out, _ = sparse_attention(**given, scale=SCALE)
    wanted, _ = evaluate(**given, scale=SCALE, sink=None, n_keys=None, compute=torch.float64)
    assert ((out - wanted).abs() <= 8e-3 * wanted.abs() + 1e-6).all()


@pytest.mark.parametrize(("heads", "fp8"), KINDS)
def test_equal_in_every_replay(heads, fp8):
    given = problem(40, heads, 704, fp8)
    first = sparse_attention(**given, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sparse_attention(**given, scale=SCALE)
    for _ in range(25):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True))


@pytest.mark.parametrize(("heads", "fp8"), KINDS)
def test_rows_past_two_gigabytes(heads, fp8):
    """The last rows of a pool whose byte (and, in bf16, element) offsets do not fit 31 bits."""
    n_rows = 3_900_000
    small = problem(3, heads, 128, fp8)
    pool = torch.zeros((n_rows, small["pool"].shape[1]), dtype=small["pool"].dtype, device="cuda")
    pool[-4096:] = small["pool"]
    present = (small["rows"] >= 0) & (small["rows"] < 4096)
    far = {**small, "pool": pool, "rows": torch.where(present, small["rows"] + n_rows - 4096, -1)}
    for one, two in zip(sparse_attention(**small, scale=SCALE), sparse_attention(**far, scale=SCALE), strict=True):
        assert torch.equal(one, two)
