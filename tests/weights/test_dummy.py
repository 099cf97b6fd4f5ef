from __future__ import annotations

import pytest
import torch

from rorqual.engine.weights import dummy
from rorqual.engine.weights.dummy import fill_dummy
from rorqual.engine.weights.target import Target

NAME = "model.layers.3.mlp.experts.7.up_proj.weight"


def make(name: str, shape: tuple[int, ...], *bounds: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    bounds = bounds or tuple((0, n) for n in shape)
    tensor = torch.full([b - a for a, b in bounds], float("nan"), dtype=dtype)
    fill_dummy({name: [Target(tensor=tensor, index=tuple(slice(*b) for b in bounds), full_shape=shape)]}, seed)
    return tensor


def test_slices_equal_the_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    full = make(NAME, (60, 50))
    assert torch.equal(make(NAME, (60, 50), (15, 30), (0, 50)), full[15:30])
    assert torch.equal(make(NAME, (60, 50), (0, 60), (20, 33)), full[:, 20:33])
    monkeypatch.setattr(dummy, "_CHUNK", 70)
    assert torch.equal(make(NAME, (60, 50)), full)


def test_seed_and_name_matter_and_nothing_else() -> None:
    full = make(NAME, (64, 64))
    assert torch.equal(make(NAME, (64, 64)), full)
    assert (make(NAME, (64, 64), seed=1) == full).float().mean() < 0.01
    assert (make(NAME.replace("7", "8"), (64, 64)) == full).float().mean() < 0.01
    torch.manual_seed(5)
    assert torch.equal(make(NAME, (64, 64)), full)
    assert torch.equal(make(NAME, (64, 64), dtype=torch.bfloat16), full.bfloat16())


def test_known_values_pin_the_stream() -> None:
    """Results measured with dummy weights stay comparable as long as these do not change."""
    x = dummy.noise(torch.arange(4), 12345)
    mask = (1 << 64) - 1
    for i in range(4):
        z = (i * 0x9E3779B97F4A7C15 + 12345) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        total = sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535
        assert x[i].item() == pytest.approx(total / dummy._STD, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "mean", "std"),
    [
        (NAME, (300, 400), 0.0, 400**-0.5),
        ("model.embed_tokens.weight", (500, 300), 0.0, 1.0),
        ("lm_head.weight", (500, 300), 0.0, 300**-0.5),
        ("model.norm.weight", (60_000,), 1.0, 0.1),
        ("model.layers.1.self_attn.indexer.k_norm.bias", (60_000,), 0.0, 0.02),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (60_000,), 0.0, 0.02),
    ],
)
def test_scale(name: str, shape: tuple[int, ...], mean: float, std: float) -> None:
    x = make(name, shape)
    assert abs(x.mean().item() - mean) < 0.02 * std and x.std().item() == pytest.approx(std, rel=0.02)
    assert x.unique().numel() > 0.8 * min(x.numel(), 100_000)


def test_noise_is_near_normal_and_uncorrelated() -> None:
    x = dummy.noise(torch.arange(400_000), 99).double()
    assert abs((x**3).mean()) < 0.02 and abs((x**4).mean() - 2.7) < 0.05  # four uniforms: kurtosis 3 - 1.2 / 4
    for lag in (1, 2, 128, 4096):
        assert abs((x[:-lag] * x[lag:]).mean()) < 0.006


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_cpu() -> None:
    tensor = torch.empty(300, 400, device="cuda")
    fill_dummy({NAME: [Target(tensor=tensor, index=(slice(None), slice(None)), full_shape=(300, 400))]}, 3)
    assert torch.equal(tensor.cpu(), make(NAME, (300, 400), seed=3))
