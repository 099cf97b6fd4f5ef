"""Rotations, their two pairings, the Hadamard transform and the norm."""

from __future__ import annotations

import math

import pytest
import torch

from rorqual.attention.config import RopeConfig
from rorqual.attention.hadamard import hadamard
from rorqual.attention.norm import RMSNorm
from rorqual.attention.rope import cos_sin_factor, inverse_frequencies, rotate, rotation

CPU = torch.device("cpu")


@pytest.mark.parametrize("interleaved", [True, False])
def test_every_pair_is_turned_by_its_angle(interleaved):
    config = RopeConfig(dim=6, theta=100.0)
    positions = torch.tensor([0, 3, 50])
    x = torch.randn(3, 2, 6, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    out = rotate(x, rotation(config, positions), interleaved=interleaved)
    for t, position in enumerate(positions.tolist()):
        for i in range(3):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
            angle = position * 100.0 ** (-2 * i / 6)
            a, b = x[t, :, first], x[t, :, second]
            torch.testing.assert_close(out[t, :, first], a * math.cos(angle) - b * math.sin(angle), atol=1e-5, rtol=0)
            torch.testing.assert_close(out[t, :, second], b * math.cos(angle) + a * math.sin(angle), atol=1e-5, rtol=0)


def test_rows_without_heads_and_slices_of_wider_rows():
    turn = rotation(RopeConfig(dim=4), torch.arange(5))
    wide = torch.randn(5, 9)
    for interleaved in (True, False):
        flat = rotate(wide[:, 5:], turn, interleaved=interleaved)
        assert torch.equal(flat, rotate(wide[:, None, 5:].clone(), turn, interleaved=interleaved)[:, 0])
    assert rotate(wide[:, 5:].bfloat16(), turn, interleaved=True).dtype == torch.float32
    assert rotate(torch.empty(0, 2, 4), turn[:0], interleaved=True).shape == (0, 2, 4)


def test_scores_depend_on_distance_only():
    config = RopeConfig(dim=8)
    q, k = torch.randn(1, 8), torch.randn(1, 8)

    def score(a: int, b: int) -> float:
        turned = [rotate(x, rotation(config, torch.tensor([p])), interleaved=True) for x, p in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-5)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain = inverse_frequencies(RopeConfig(dim=64), CPU)
    yarn = inverse_frequencies(RopeConfig(dim=64, factor=40.0), CPU)
    assert torch.equal(yarn[:11], plain[:11]) and torch.allclose(yarn[23:], plain[23:] / 40)  # DeepSeek-V3's ramp: 10 to 23
    assert ((yarn[11:23] < plain[11:23]) & (yarn[11:23] > plain[11:23] / 40)).all()


@pytest.mark.parametrize(
    "settings,expected",
    [
        ({}, 1.0),
        ({"factor": 40.0}, 0.1 * math.log(40) + 1),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ({"factor": 40.0, "mscale": 0.707}, 0.1 * math.log(40) + 1),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 1.0, "attention_factor": 1.5}, 1.0),
    ],
)
def test_amplitude_of_cos_and_sin(settings, expected):
    assert cos_sin_factor(RopeConfig(dim=8, **settings)) == pytest.approx(expected)


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_is_orthonormal_and_its_own_inverse(width):
    x, y = torch.randn(3, 5, width), torch.randn(3, 5, width)
    torch.testing.assert_close(hadamard(hadamard(x)), x, atol=1e-5, rtol=0)
    torch.testing.assert_close((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1), atol=2e-5, rtol=1e-5)
    matrix = hadamard(torch.eye(width))
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    torch.testing.assert_close(matrix, signs * width**-0.5)


def test_hadamard_refuses_other_widths():
    with pytest.raises(ValueError, match="power of two, got 12"):
        hadamard(torch.zeros(2, 12))


def test_rms_norm_divides_in_fp32_and_multiplies_in_the_input_dtype():
    norm = RMSNorm(16, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 16))
    x = torch.randn(4, 16) * 1e-2
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), expected.float(), atol=1e-6, rtol=1e-6)
    half = norm.bfloat16()
    wide = x.bfloat16().float()
    inner = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).bfloat16()
    assert torch.equal(half(x.bfloat16()), half.weight * inner)
