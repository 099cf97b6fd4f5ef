"""What a server has probably cached: the prompts that it was sent of late."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class GuessedCache:
    """Hashes of at most ``most`` blocks, the least recently used of which give way. The ends of prompts go before their starts."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, hashes: Sequence[int]) -> list[int]:
        """A prompt with these blocks was sent; returns those that gave way."""
        for value in reversed(hashes):
            self._blocks[value] = None
            self._blocks.move_to_end(value)
        return [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self.most)]

    def clear(self) -> None:
        """The server has forgotten all."""
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)
