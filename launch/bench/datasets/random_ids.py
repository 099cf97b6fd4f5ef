"""Random prompts: token ids, or their text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .request import Decode, Encode, Request, check_least

#: rounds of cutting and filling until a text has the length wanted
_ROUNDS = 10


def draw_lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    """Even draws from ``length * (1 - ratio)`` to ``length * (1 + ratio)``, at least 1."""
    low, high = max(1, int(length * (1 - ratio))), int(length * (1 + ratio))
    drawn: list[int] = rng.integers(low, high + 1, size=count).tolist()
    return drawn


def draw_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    drawn: list[int] = rng.integers(0, vocab_size, size=count).tolist()
    return drawn


def random_requests(
    *, count: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int, prefix_len: int = 0
) -> list[Request]:
    """Random ids, the same for the same seed; lengths vary by ``range_ratio`` up and down, after ``prefix_len`` tokens that all share.

    Raises:
        ValueError: a count, length or ratio out of range.
    """
    for name, value in (("num-prompts", count), ("input-len", input_len), ("output-len", output_len)):
        check_least(name, value, 1)
    check_least("random-prefix-len", prefix_len, 0)
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"--random-range-ratio must be from 0 to below 1, found {range_ratio}")
    rng = np.random.default_rng(seed)
    lengths = [draw_lengths(rng, length, range_ratio, count) for length in (input_len, output_len)]
    prefix = draw_ids(rng, prefix_len, vocab_size) if prefix_len else []
    return [Request(token_ids=prefix + draw_ids(rng, n, vocab_size), output_len=m) for n, m in zip(*lengths, strict=True)]


def as_text(request: Request, encode: Encode, decode: Decode) -> Request:
    """The request with its prompt as text that encodes to as many tokens, and those tokens.

    Text of random ids encodes to other ids and often to another number of them: it is cut or filled until the number is right.
    """
    wanted, ids = len(request.token_ids), request.token_ids
    text = decode(ids)
    for _ in range(_ROUNDS):
        ids = encode(text)
        if len(ids) == wanted:
            break
        ids = ids[:wanted] if len(ids) > wanted else ids + request.token_ids[: wanted - len(ids)]
        text = decode(ids)
    return replace(request, text=text, token_ids=encode(text))
