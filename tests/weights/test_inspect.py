from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.models.build import build_stage
from rorqual.engine.weights.convert import convert_fp8
from rorqual.engine.weights.reader import Checkpoint
from rorqual.engine.weights.shapes import tensor_shapes
from rorqual.launch.inspect import describe, run_inspect
from rorqual.parallel.grid import Grid
from tests.checkpoints import NAMES, TINY, checkpoint
from tests.weights import published


@pytest.mark.parametrize("name", ["tiny", *NAMES])
def test_shapes_equal_the_headers(name: str) -> None:
    path = TINY if name == "tiny" else checkpoint(name)
    shapes = {t.name: t.shape for t in tensor_shapes(parse_model_config(path))}
    assert shapes == {info.name: info.shape for info in Checkpoint(path).tensors.values()}


def test_counts_of_tiny_equal_the_headers() -> None:
    found = describe(parse_model_config(TINY))
    infos = Checkpoint(TINY).tensors.values()
    assert found["total"]["parameters_with_mtp"] == sum(math.prod(info.shape) for info in infos)
    assert found["total"]["bytes_with_mtp"] == sum(info.size for info in infos) == 30443840
    indexer = [info for info in infos if ".indexer." in info.name and not info.name.startswith("model.layers.5.")]
    assert found["parts"]["indexer"] == {
        "tensors": len(indexer),
        "parameters": sum(math.prod(info.shape) for info in indexer),
        "bytes": sum(info.size for info in indexer),
    }
    experts = [info for info in infos if ".experts." in info.name and not info.name.startswith("model.layers.5.")]
    assert found["parts"]["routed experts"]["bytes"] == sum(info.size for info in experts)


def test_fp8_bytes_equal_the_headers(tmp_path: Path) -> None:
    convert_fp8(TINY, tmp_path / "fp8")
    found = describe(parse_model_config(tmp_path / "fp8"))
    assert found["total"]["bytes_with_mtp"] == sum(info.size for info in Checkpoint(tmp_path / "fp8").tensors.values())


TOTALS = [  # published sizes: 236B, 15.7B, 671B (685B with MTP), 1.03T, 744B
    ("V2", 235_741_434_880, 0),
    ("V2-Lite", 15_706_484_224, 0),
    ("V3", 671_026_419_200, 684_489_845_504),
    ("V3.2", 671_877_944_064, 685_355_329_792),
    ("Kimi-K2", 1_026_408_232_448, 0),
    ("GLM-5", 743_911_218_432, 0),
]


@pytest.mark.parametrize(("name", "main", "with_mtp"), TOTALS)
def test_totals_of_published_models(name: str, main: int, with_mtp: int) -> None:
    total = describe(parse_model_config(published.ALL[name]))["total"]
    assert total["parameters"] == main
    if with_mtp:
        assert total["parameters_with_mtp"] == with_mtp


def test_parts_of_v32() -> None:
    found = describe(parse_model_config(published.V32))
    parts = found["parts"]
    assert parts["indexer"]["parameters"] == 61 * (64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128)
    assert parts["routed experts"]["parameters"] == 58 * 256 * 3 * 7168 * 2048
    assert sum(row["parameters"] for row in parts.values()) == found["total"]["parameters_with_mtp"]
    assert found["total"]["active_parameters"] == pytest.approx(38.4e9, rel=0.01)


def test_kv_bytes() -> None:
    for dtype, latent, index in (("bfloat16", 1152, 256), ("fp8", 656, 132), ("float32", 2304, 512)):
        kv = describe(parse_model_config(published.V32), kv_dtype=dtype)["kv"]
        assert (kv["latent_bytes_per_token_layer"], kv["indexer_bytes_per_token_layer"]) == (latent, index)
        assert kv["bytes_per_token"] == 61 * (latent + index) and kv["bytes_per_page"] == 64 * kv["bytes_per_token"]
    kv = describe(parse_model_config(published.V32), kv_dtype="fp8", index_dtype="fp4")["kv"]
    assert (kv["dtype"], kv["index_dtype"], kv["indexer_bytes_per_token_layer"]) == ("fp8", "fp4", 68)
    assert kv["bytes_per_token"] == 61 * (656 + 68)
    shared = parse_model_config({**published.GLM_5, "index_topk_freq": 4})
    kv = describe(shared, kv_dtype="fp8", pp=2)["kv"]
    full = shared.attention.indexer.layer_types.count("full")  # type: ignore[union-attr]
    assert kv["bytes_per_token"] == 78 * 656 + full * 132 == sum(kv["bytes_per_token_per_stage"])


def test_memory_per_rank() -> None:
    config = parse_model_config(published.V3)
    alone = describe(config)["per_rank"][0]
    assert alone["bytes"] == sum(alone["parts"].values())
    parts = describe(config)["parts"]
    assert alone["parts"]["routed experts"] == 2 * parts["routed experts"]["parameters"]
    assert alone["parts"]["router"] == 4 * parts["router"]["parameters"]
    split = describe(config, tp=8, dp=4)["per_rank"][0]["parts"]
    assert split["routed experts"] * 32 == alone["parts"]["routed experts"]
    for name in ("embedding", "head", "dense MLP", "shared experts"):
        assert split[name] * 8 == alone["parts"][name]
    assert split["router"] == alone["parts"]["router"] and split["norms"] == alone["parts"]["norms"]
    whole = 61 * (1536 + 576) * 7168 * 2
    assert (split["attention"] - whole) * 8 == alone["parts"]["attention"] - whole
    no_ep = describe(config, tp=8, dp=4, ep=1)["per_rank"][0]["parts"]
    assert no_ep["routed experts"] * 8 == alone["parts"]["routed experts"]
    stages = describe(config, pp=4)["per_rank"]
    assert [stage["layers"] for stage in stages] == [[0, 15], [15, 30], [30, 45], [45, 61]]
    assert sum(stage["bytes"] for stage in stages) == alone["bytes"]
    assert "embedding" in stages[0]["parts"] and "head" not in stages[0]["parts"] and "head" in stages[3]["parts"]


@pytest.mark.parametrize("name", ["tiny", *NAMES])
def test_memory_equals_the_real_model(name: str) -> None:
    path = TINY if name == "tiny" else checkpoint(name)
    config = parse_model_config(path)
    stage = build_stage(config, EngineConfig(model=str(path)), Grid.single(torch.device("cpu")), getattr(torch, config.dtype))
    size = sum(param.numel() * param.element_size() for param in stage.model.parameters())
    assert describe(config)["per_rank"][0]["bytes"] == size


def test_vocabulary_that_does_not_divide_is_padded() -> None:
    config = parse_model_config({**published.V2_LITE, "vocab_size": 102401})
    found = describe(config, tp=2)["per_rank"][0]["parts"]
    assert found["embedding"] == 51201 * 2048 * 2


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "num_attention_heads 128 does not divide over 3 ranks; valid: "),
        ({"dp": 3}, "routed experts 256 does not divide over 3 ranks; valid: "),
        ({"tp": 0}, "tp must be at least 1, found 0"),
        ({"dp": 4, "ep": 2}, r"ep 2 does not fit dp 4 x tp 1; valid: \[1, 4\]"),
        ({"pp": 62}, "pipeline_parallel_size 62 is more than the model's 61 layers"),
        ({"index_dtype": "int4"}, "unknown index cache dtype 'int4'; use one of float32, bfloat16, fp8, fp4"),
        ({"kv_dtype": "int4"}, "kv cache dtype must be auto, float32, bfloat16 or fp8, found 'int4'"),
    ],
)
def test_bad_layouts(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(parse_model_config(published.V3), **layout)  # type: ignore[arg-type]


def test_run_inspect_text_and_json() -> None:
    text = run_inspect("tiny", tp=2, pp=2)
    for piece in ("deepseek_v32", "routed experts", "6,291,456", "total with MTP", "15,221,072", "KV cache (bfloat16", "2,240 B"):
        assert piece in text
    assert json.loads(run_inspect("tiny", as_json=True)) == describe(parse_model_config(TINY))
    with pytest.raises(ValueError, match="model folder './nowhere' does not exist"):
        run_inspect("./nowhere")
