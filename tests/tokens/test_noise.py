from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.engine.sampling.noise import derive_seed, mix, request_seed, uniform

# first outputs of SplitMix64 with state 1234567, as published with the generator
SPLITMIX_1234567 = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
GAMMA = 0x9E3779B97F4A7C15
# uniform(seed, position), worked out with Python's integers
FIXED = [((0, 0), 0.6524484863740322), ((0, 1), 0.7012121095215252), ((1, 0), 0.3681895156516696), ((2**63 - 1, 4095), 0.5268763636163535)]


def signed(word: int) -> int:
    word &= 2**64 - 1
    return word - 2**64 if word >> 63 else word


def chi_square(u: np.ndarray, bins: int) -> float:
    counts = np.bincount((u * bins).astype(int), minlength=bins)
    return float(((counts - len(u) / bins) ** 2 / (len(u) / bins)).sum())


def test_mix_gives_the_published_stream() -> None:
    states = torch.tensor([signed(1234567 + (i + 1) * GAMMA) for i in range(5)])
    assert [int(x) % 2**64 for x in mix(states)] == list(SPLITMIX_1234567)


@pytest.mark.parametrize(("key", "value"), FIXED)
def test_fixed_values(key: tuple[int, int], value: float) -> None:
    assert uniform(torch.tensor([key[0]]), torch.tensor([key[1]])).item() == value


def test_uniform_over_positions_and_over_seeds() -> None:
    n, bins = 1 << 17, 256
    limit = 256 + 5 * np.sqrt(2 * 255)  # five standard deviations of chi-square with 255 degrees of freedom
    line = torch.arange(n)
    pairs = [(torch.full((n,), 42), line), (line, torch.full((n,), 7)), (line * 0x10001, line % 13), (line + GAMMA // 2, line)]
    for seeds, positions in pairs:
        u = uniform(seeds, positions).numpy()
        assert u.min() > 0 and u.max() < 1
        assert chi_square(u, bins) < limit


def test_neighbours_are_independent() -> None:
    n = 1 << 16
    line = torch.arange(n)
    base = uniform(line, torch.zeros(n, dtype=torch.int64)).numpy()
    for seeds, positions in ((line + 1, 0), (line, 1), (line + 1, 1), (line - 1, 1)):
        other = uniform(seeds, torch.full((n,), positions)).numpy()
        pairs = (base * 16).astype(int) / 16 + other / 16
        assert chi_square(pairs, 256) < 256 + 5 * np.sqrt(2 * 255)


def test_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = torch.randint(0, 2**62, (999,)), torch.randint(0, 9999, (999,))
    together = uniform(seeds, positions)
    for row in (0, 1, 500, 998):
        assert uniform(seeds[row : row + 1], positions[row : row + 1]).item() == together[row].item()
    order = torch.randperm(999)
    assert torch.equal(uniform(seeds[order], positions[order]), together[order])


def test_derived_seeds() -> None:
    assert derive_seed(5) == 5 and request_seed(5, 99, 3, 0) == 5  # a request's own seed is used as given
    assert request_seed(5, 99, 3, 1) == request_seed(5, 0, 8, 1) != 5  # and does not depend on the engine
    seeds = {request_seed(None, engine, index, completion) for engine in range(3) for index in range(100) for completion in range(3)}
    assert len(seeds) == 900 and all(0 <= s < 2**63 for s in seeds)
