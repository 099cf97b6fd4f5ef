"""Requests of an offline benchmark: random token ids, or prompts of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..prompts import PromptItem, read_prompts


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: its prompt and how many tokens it must generate."""

    token_ids: list[int]  # the prompt
    output_len: int  # tokens to generate, end tokens ignored


def random_requests(*, count: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int) -> list[Request]:
    """Random ids, the same for the same seed. Lengths are even draws from ``len * (1 - ratio)`` to ``len * (1 + ratio)``.

    Raises:
        ValueError: a count, length or ratio out of range.
    """
    for name, value in (("num-prompts", count), ("input-len", input_len), ("output-len", output_len)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, found {value}")
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"--random-range-ratio must be from 0 to below 1, found {range_ratio}")
    rng = np.random.default_rng(seed)
    lengths = [_lengths(rng, length, range_ratio, count) for length in (input_len, output_len)]
    return [Request(token_ids=rng.integers(0, vocab_size, size=n).tolist(), output_len=m) for n, m in zip(*lengths, strict=True)]


def _lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, int(length * (1 - ratio))), int(length * (1 + ratio))
    drawn: list[int] = rng.integers(low, high + 1, size=count).tolist()
    return drawn


def file_requests(path: str, *, count: int, output_len: int, encode: Callable[[PromptItem], list[int]]) -> list[Request]:
    """The first ``count`` prompts of a file (all, if it has fewer), each with ``output_len`` tokens to generate.

    Raises:
        ValueError: see ``read_prompts``; or an output length below 1.
    """
    if output_len < 1:
        raise ValueError(f"--output-len must be at least 1, found {output_len}")
    return [Request(token_ids=encode(item), output_len=output_len) for item in read_prompts(path)[:count]]
