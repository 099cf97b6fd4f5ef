"""Conversations over a long context: each turn sends all that was said before, and the answers, again."""

from __future__ import annotations

import numpy as np

from .random_ids import draw_ids, draw_lengths
from .request import Request, Turn, check_least


def multi_turn_requests(
    *, talks: int, turns: int, context_len: int, turn_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int
) -> list[Request]:
    """``talks`` conversations: a first prompt of ``context_len`` tokens, then ``turns - 1`` questions of ``turn_len``.

    Raises:
        ValueError: a count or a length out of range.
    """
    counts = (
        ("num-conversations", talks),
        ("num-turns", turns),
        ("context-len", context_len),
        ("turn-len", turn_len),
        ("output-len", output_len),
    )
    for name, value in counts:
        check_least(f"multi-turn-{name}", value, 1)
    rng = np.random.default_rng(seed)
    found = []
    for context in draw_lengths(rng, context_len, range_ratio, talks):
        asked, answered = (draw_lengths(rng, length, range_ratio, turns) for length in (turn_len, output_len))
        later = [Turn(token_ids=draw_ids(rng, n, vocab_size), output_len=m) for n, m in zip(asked[1:], answered[1:], strict=True)]
        found.append(Request(token_ids=draw_ids(rng, context, vocab_size), output_len=answered[0], then=tuple(later)))
    return found
