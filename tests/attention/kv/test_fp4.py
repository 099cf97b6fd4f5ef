"""FP4 index keys: the layout bit by bit, the choice of multipliers, exactness in e4m3, and the store in a cache."""

from __future__ import annotations

import pytest
import torch

from rorqual.attention.hadamard import hadamard
from rorqual.attention.kv import fp4
from rorqual.attention.kv.rows import Fp4IndexRows

WIDTHS = [32, 64, 128, 256]


def keys(width: int, tokens: int = 50, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    spread = torch.exp(0.7 * torch.randn(width, generator=rng))
    values = torch.nn.functional.layer_norm(torch.randn(tokens, width, generator=rng) * spread, (width,))
    return hadamard(values) * 10 ** (6 * torch.rand(tokens, 1, generator=rng) - 3)


def read_bits(codes: torch.Tensor, word: int) -> list[float]:
    """Values of one key, uint8 [W / 2], by the description of the format, one at a time."""
    width = 2 * len(codes)
    words = [int.from_bytes(bytes(codes[4 * n : 4 * n + 4].tolist()), "little") for n in range(width // 8)]
    scale = torch.tensor([word & ~0xFFFF], dtype=torch.int64).to(torch.int32).view(torch.float32).double().item()
    values = []
    for place in range(width):
        j, half, q, i = place // 32, place // 16 % 2, place // 4 % 4, place % 4
        bits = words[q * (width // 32) + j]
        magnitude = fp4.LEVELS[bits >> (16 * half + 4 * i) & 7]
        sign = -1.0 if bits >> (8 * i + 7 - 4 * half) & 1 else 1.0
        values.append(sign * magnitude * fp4.MULTIPLIERS[word >> 4 * q & 15] * scale)
    return values


@pytest.mark.parametrize("width", WIDTHS)
def test_every_bit_is_where_the_description_says(width):
    rng = torch.Generator().manual_seed(width)
    codes = torch.randint(0, 256, (6, width // 2), generator=rng, dtype=torch.uint8)
    words = (torch.rand(6, generator=rng).view(torch.int32) & -65536) | torch.randint(0, 65536, (6,), generator=rng, dtype=torch.int32)
    values, scales = fp4.decode(codes, words)
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), values), "a value is not exact in e4m3"
    expected = torch.tensor([read_bits(code, word) for code, word in zip(codes, words.tolist(), strict=True)], dtype=torch.float64)
    assert torch.equal(values.double() * scales[:, None].double(), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_decoding_finds_the_nearest_values(width):
    values = keys(width)
    codes, words = fp4.quantise(values)
    assert codes.shape == (50, width // 2) and words.shape == (50,) and fp4.key_bytes(width) == width // 2 + 4
    numbers, scales = fp4.decode(codes, words)
    found = (numbers * scales[:, None]).double()
    factors = torch.tensor(fp4.MULTIPLIERS)[torch.stack([words >> 4 * b & 15 for b in range(4)], 1).long()]
    steps = (factors * scales[:, None]).double()[:, torch.arange(width) // 4 % 4]
    grid = torch.tensor(fp4.LEVELS, dtype=torch.float64)
    nearest = (values.abs().double()[:, :, None] - grid * steps[:, :, None]).abs().amin(2)
    torch.testing.assert_close((found - values.double()).abs(), nearest, rtol=1e-4, atol=1e-6 * float(values.abs().max()))
    assert bool(((found == 0) | (found.sign() == values.double().sign())).all())
    assert float(((found - values).norm(dim=1) / values.norm(dim=1)).max()) < 0.16


def test_a_scale_is_the_least_bf16_that_holds_the_key():
    values = keys(128)
    scales = fp4.decode(*fp4.quantise(values))[1]
    true = values.abs().amax(1) / fp4.FULL
    assert torch.equal(scales.bfloat16().float(), scales)
    assert bool((scales >= true).all()) and bool((scales <= true * (1 + 2**-7)).all())


def test_a_multiplier_is_the_best_of_those_tried():
    values = keys(64, tokens=20)
    codes, words = fp4.quantise(values)
    scales = fp4.decode(codes, words)[1]
    table, grid = torch.tensor(fp4.MULTIPLIERS, dtype=torch.float64), torch.tensor(fp4.LEVELS, dtype=torch.float64)
    for key, word, scale in zip(values.double(), words.tolist(), scales.double(), strict=True):
        for block, part in enumerate((key.abs() / scale).view(4, 4, 4).transpose(0, 1).flatten(1)):
            errors = (part[:, None, None] - grid * table[:, None]).abs().amin(2).square().sum(0)
            smallest = int((6 * table >= part.max()).sum()) - 1
            tried = [n for n in range(smallest - 1, smallest + 3) if 0 <= n < 16]
            best = min(errors[n] for n in tried)
            assert errors[word >> 4 * block & 15] <= best * (1 + 1e-6)


def test_zeros_and_what_is_not_finite():
    values = torch.zeros(4, 128)
    values[1, 5], values[2, 127], values[3, 0] = float("nan"), float("-inf"), 1e-20
    numbers, scales = fp4.decode(*fp4.quantise(values))
    assert not numbers[0].any() and bool(scales[[0, 3]].isfinite().all()) and bool(scales[[1, 2]].isnan().all())
    assert float((numbers * scales[:, None])[3].abs().max()) < 1e-12


def test_blocks_of_unequal_size_keep_their_own_precision():
    values = keys(128, tokens=30)
    block = torch.arange(128) // 4 % 4 == 2
    values[:, block] /= 12
    numbers, scales = fp4.decode(*fp4.quantise(values))
    small, found = values[:, block], (numbers * scales[:, None])[:, block]
    assert float((found - small).norm() / small.norm()) < 0.13


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_come_back_from_the_pages_they_were_written_to(page_size):
    store = Fp4IndexRows(5, page_size, 64, torch.float32, torch.device("cpu"))
    assert store.n_bytes == 5 * page_size * 36 and store.pool.shape == (5, page_size * 36)
    store.poison(torch.arange(5))
    rows = torch.tensor([4 * page_size, page_size, 2 * page_size])
    values = keys(64, tokens=3)
    store.write(rows, values)
    numbers, scales = fp4.decode(*fp4.quantise(values))
    assert torch.equal(store.read(rows[None])[0], numbers * scales[:, None])
    page = store.pages[4]
    assert torch.equal(page[:32], fp4.quantise(values)[0][0]) and int(page[32 * page_size :].view(torch.int32)[0]) == int(
        fp4.quantise(values)[1][0]
    )
    assert bool(store.read(torch.tensor([0])).isnan().all())
    assert store.read(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 64)
