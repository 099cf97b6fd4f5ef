"""One request's place in its grammar."""

from __future__ import annotations

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


class Matcher:
    """Where a request is in its grammar, and what may come next."""

    def __init__(self, inner: Any, vocab_size: int, *, ends: Sequence[int], held: int = 0) -> None:
        """``inner``: xgrammar's matcher. ``ends``: tokens that end the request. ``held``: tokens before which they should not come."""
        self._inner = inner
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
        # The library says whether the mask matters; it always does: ids without a token are forbidden too.
        self._inner.fill_next_token_bitmask(mask[None], 0)
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
        return bool(self._inner.accept_token(token))
