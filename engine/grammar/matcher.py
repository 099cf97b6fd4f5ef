"""One request's place in its grammar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask: a bit for every token, lowest first."""
    return -(-vocab_size // 32)


def clear(mask: Mask, ids: Sequence[int]) -> None:
    """Forbid ``ids``."""
    bits = mask.view(np.uint32)
    for token in ids:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


#: seconds of this thread that one grammar may take beyond those that it gets: for each token, and for each second that passes
_SPARE_S, _TOKEN_S, _SHARE = 1.0, 0.01, 0.01


class Spent:
    """Time that the requests of one grammar took. An ambiguous grammar takes longer for each token than for the one before."""

    def __init__(self) -> None:
        self._seconds = 0.0  # beyond what it gets
        self._last = time.monotonic()

    def add(self, seconds: float, tokens: int) -> None:
        """``seconds`` (of ``time.thread_time``) for ``tokens``."""
        now = time.monotonic()
        self._seconds = max(0.0, self._seconds + seconds - _TOKEN_S * tokens - _SHARE * (now - self._last))
        self._last = now

    @property
    def problem(self) -> str | None:
        """What is wrong if it took too long."""
        if self._seconds <= _SPARE_S:
            return None
        return f"the grammar takes far more than {1000 * _TOKEN_S:g} ms a token to follow and would hold up other requests; simplify it"


class Matcher:
    """Where a request is in its grammar, and what may come next."""

    def __init__(self, inner: Any, vocab_size: int, *, ends: Sequence[int], held: int = 0, spent: Spent | None = None) -> None:
        """``inner``: xgrammar's matcher. ``ends``: tokens that end the request. ``held``: tokens before which they should not come.

        ``spent``: of all requests with this grammar.
        """
        self._inner = inner
        self.spent = Spent() if spent is None else spent
        self.ends = ends
        self._held = held
        self._accepted = 0
        self._last = np.uint32((1 << (vocab_size % 32 or 32)) - 1)  # bits of the last word that are tokens

    @property
    def ended(self) -> bool:
        """The grammar is through and its end token was taken."""
        return bool(self._inner.is_terminated())

    def fill(self, mask: Mask) -> bool:
        """Write the tokens that may come next into ``mask`` int32 [W]; False when there is none.

        End tokens are held back where the text may go on and is shorter than its minimum.
        """
        start = time.thread_time()
        # The library says whether the mask matters; it always does: ids without a token are forbidden too.
        self._inner.fill_next_token_bitmask(mask[None], 0)
        self.spent.add(time.thread_time() - start, 0)
        mask.view(np.uint32)[-1] &= self._last
        if self._accepted < self._held:
            whole = mask.copy()
            clear(mask, self.ends)
            if not mask.any():
                mask[:] = whole
        return bool(mask.any())

    def accept(self, token: int) -> bool:
        """Take a token that was sampled; False when the grammar does not have it there."""
        self._accepted += 1
        start = time.thread_time()
        taken = bool(self._inner.accept_token(token))
        self.spent.add(time.thread_time() - start, 1)
        return taken
