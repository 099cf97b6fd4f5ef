from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.weights import fp8
from rorqual.engine.weights.convert import convert_fp8, is_quantised
from rorqual.engine.weights.fp8 import decode_scale, dequantise_into, quantise_block_fp8, scale_shape
from rorqual.engine.weights.loader import load_weights
from rorqual.engine.weights.reader import Checkpoint
from rorqual.engine.weights.target import Target
from tests.checkpoints import TINY, checkpoint, edit_config, hf_model


def by_hand(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """Value x scale, one element at a time in spirit: the scales are repeated over their blocks."""
    spread = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values.float() * spread[: values.shape[0], : values.shape[1]]


@given(data=st.data(), rows=st.integers(1, 400), columns=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_any_slice_equals_value_times_scale(data: st.DataObject, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = torch.randn(rows, columns, generator=generator).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape((rows, columns)), generator=generator) + 0.01
    r0, c0 = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    r1, c1 = data.draw(st.integers(r0, rows)), data.draw(st.integers(c0, columns))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    out = torch.full((r1 - r0, c1 - c0), float("nan"), dtype=dtype)
    dequantise_into(out, values, scale, ((r0, r1), (c0, c1)))
    assert torch.equal(out, by_hand(values, scale)[r0:r1, c0:c1].to(dtype))


def test_strips_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(8, 3)
    monkeypatch.setattr(fp8, "_STRIP", 50_000)
    out = torch.full((900, 200), float("nan"))
    dequantise_into(out, values, scale, ((50, 950), (70, 270)))
    assert torch.equal(out, by_hand(values, scale)[50:950, 70:270])


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", [(128, 128), (160, 256), (130, 1), (1, 300)])
def test_quantise(shape: tuple[int, int], scale_format: Any) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values, scale = quantise_block_fp8(weight, scale_format=scale_format)
    assert values.dtype == torch.float8_e4m3fn and values.shape == shape and scale.shape == scale_shape(shape)
    numbers = decode_scale(scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            ideal = block.abs().max() / 448
            if scale_format == "float32":
                assert numbers[i, j] == ideal
            else:
                assert ideal <= numbers[i, j] < 2 * ideal and torch.frexp(numbers[i, j]).mantissa == 0.5
    # e4m3 has 3 mantissa bits, so 1/16 of a value; below 2**-6 its step is 2**-9, so half of that times the scale.
    error = (by_hand(values, numbers) - weight).abs()
    bound = torch.maximum(weight.abs() / 16, by_hand(torch.full(shape, 2.0**-10), numbers))
    assert bool((error <= bound * 1.0001).all())


def test_zero_block_and_powers_of_two() -> None:
    values, scale = quantise_block_fp8(torch.zeros(4, 4), scale_format="ue8m0")
    assert decode_scale(scale).item() == 1.0 and not values.float().any()
    exact = torch.full((4, 4), 448.0 * 2.0**-20)
    values, scale = quantise_block_fp8(exact, scale_format="ue8m0")
    assert decode_scale(scale).item() == 2.0**-20 and torch.equal(by_hand(values, decode_scale(scale)), exact)


def test_ue8m0_stored_as_bytes() -> None:
    assert torch.equal(decode_scale(torch.tensor([126, 127, 130], dtype=torch.uint8)), torch.tensor([0.5, 1.0, 8.0]))


def full(folder: Path, names: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    targets = {
        name: [Target(tensor=torch.empty(shape, dtype=dtype), index=tuple(slice(0, n) for n in shape), full_shape=shape)]
        for name, shape in names.items()
    }
    load_weights(targets, folder, model=parse_model_config(folder), known=lambda name: True)
    return {name: places[0].tensor for name, places in targets.items()}


@pytest.fixture(scope="module", params=["float32", "ue8m0"])
def tiny_fp8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "rorqual-tiny-fp8"
    convert_fp8(TINY, folder, scale_format=request.param, shards=3)
    return folder


def test_converted_tiny_loads_to_value_times_scale(tiny_fp8: Path) -> None:
    raw = {name: t for file in sorted(tiny_fp8.glob("*.safetensors")) for name, t in load_file(file).items()}
    source = {name: info.shape for name, info in Checkpoint(TINY).tensors.items()}
    loaded = full(tiny_fp8, source, torch.float32)
    original = full(TINY, source, torch.float32)
    quantised = 0
    for name, tensor in loaded.items():
        if is_quantised(name):
            quantised += 1
            assert raw[name].dtype == torch.float8_e4m3fn
            assert torch.equal(tensor, by_hand(raw[name], raw[name + "_scale_inv"])), name
            assert (tensor - original[name]).abs().max() < 0.07 * original[name].abs().max()
        else:
            assert raw[name].dtype == torch.float32 or raw[name].dtype == torch.bfloat16
            assert torch.equal(tensor, original[name]), name
    assert quantised == len([n for n in raw if n.endswith("_scale_inv")]) == 6 * 7 + 3 + 5 * 17 * 3
    kept = ("layernorm", "k_norm", "embed_tokens", "head", "mlp.gate.", "weights_proj", "eh_proj", "norm.weight")
    assert all(any(word in name for word in kept) for name in source if not is_quantised(name))


def test_converted_config_and_files(tiny_fp8: Path) -> None:
    config = parse_model_config(tiny_fp8)
    assert config.quantization is not None and config.quantization["weight_block_size"] == [128, 128]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tiny_fp8 / name).read_bytes() == (TINY / name).read_bytes()
    assert len(list(tiny_fp8.glob("*.safetensors"))) == 3
    with pytest.raises(ValueError, match="is quantised already"):
        convert_fp8(tiny_fp8, tiny_fp8.parent / "again")


def test_scales_in_another_shard(tmp_path: Path) -> None:
    values, scale = quantise_block_fp8(torch.randn(200, 300))
    save_file({"w": values}, str(tmp_path / "a.safetensors"))
    save_file({"w_scale_inv": scale, "other": torch.ones(1000)}, str(tmp_path / "b.safetensors"))
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    assert torch.equal(full(tmp_path, {"w": (200, 300)}, torch.float32)["w"], by_hand(values, scale))
    place = Target(tensor=torch.empty(50, 300), index=(slice(150, 200), slice(0, 300)), full_shape=(200, 300))
    report = load_weights({"w": [place]}, tmp_path, model=parse_model_config(tmp_path), known=lambda name: False)
    assert report.bytes_read == 50 * 300 + 4 * 6 and report.tensors == 1 and report.unexpected == ("other",)


def test_block_size_of_the_config_is_used(tmp_path: Path) -> None:
    values, scale = quantise_block_fp8(torch.randn(100, 100), (32, 64))
    save_file({"w": values, "w_scale_inv": scale}, str(tmp_path / "a.safetensors"))
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 64]})
    assert torch.equal(full(tmp_path, {"w": (100, 100)}, torch.float32)["w"], by_hand(values, scale, (32, 64)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "FP8 tensor w has no scales: w_scale_inv is in no file"),
        (
            {"w_scale_inv": torch.ones(1, 1)},
            r"tensor w_scale_inv must have shape \[2, 1\] for blocks of \[128, 128\], found \[1, 1\]",
        ),
    ],
)
def test_bad_scales(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file({"w": torch.ones(200, 100).to(torch.float8_e4m3fn), **tensors}, str(tmp_path / "a.safetensors"))
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        full(tmp_path, {"w": (200, 100)}, torch.float32)


def test_fp8_must_have_two_dimensions(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8).to(torch.float8_e4m3fn)}, str(tmp_path / "a.safetensors"))
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"FP8 tensor w must have two dimensions, found \[8\]"):
        full(tmp_path, {"w": (8,)}, torch.float32)


def test_agrees_with_transformers(tmp_path: Path) -> None:
    """transformers dequantises FP8 on the CPU; it derives the block from the scale grid, so edges must be whole blocks."""
    pytest.importorskip("accelerate")
    source = checkpoint(
        "v3",
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        q_lora_rank=128,
        kv_lora_rank=112,
        num_attention_heads=8,
        num_key_value_heads=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        n_routed_experts=8,
    )
    folder = tmp_path / "fp8"
    convert_fp8(source, folder)
    names = {name: info.shape for name, info in Checkpoint(source).tensors.items()}
    loaded = full(folder, names, torch.float32)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    theirs = dict(hf_model(folder).named_parameters())
    quantised = [name for name in loaded if is_quantised(name) and ".experts." not in name]
    assert len(quantised) == 3 * 5 + 3 * 3
    for name in quantised:
        assert torch.equal(theirs[name], loaded[name]), name
    experts = theirs["model.layers.1.mlp.experts.down_proj"]
    for expert in range(8):
        assert torch.equal(experts[expert], loaded[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"])


def test_a_module_left_wide_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(200, 100)}, str(tmp_path / "a.safetensors"))
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    whole = (slice(0, 200), slice(0, 100))
    narrow = Target(tensor=torch.empty(200, 100, dtype=torch.float8_e4m3fn), index=whole, full_shape=(200, 100))
    scale = Target(tensor=torch.empty(2, 1), index=(slice(0, 2), slice(0, 1)), full_shape=(2, 1))
    with pytest.raises(ValueError, match="tensor w is torch.float32, but .* use --fp8-gemm-backend dequantise"):
        load_weights({"w": [narrow], "w_scale_inv": [scale]}, tmp_path, model=parse_model_config(tmp_path), known=lambda name: False)
