"""What one process has of another's grammars. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

#: characters of all grammars on a shelf
MOST_ON_SHELF = 128 << 20


class Shelf:
    """Names of the grammars that went over one connection, the least recently used first.

    Both ends keep one and feed it with the same messages in the same order, so they agree on what is still there.
    """

    def __init__(self, most: int = MOST_ON_SHELF) -> None:
        self._most = most
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def use(self, name: str, size: int) -> tuple[bool, list[str]]:
        """Whether ``name`` is new, and the names that give way to it."""
        if self.touch(name):
            return False, []
        self._sizes[name] = size
        self._total += size
        gone = []
        while self._total > self._most and len(self._sizes) > 1:
            old, freed = self._sizes.popitem(last=False)
            self._total -= freed
            gone.append(old)
        return True, gone

    def touch(self, name: str) -> bool:
        """Whether ``name`` is there; it is the most recently used now."""
        found = name in self._sizes
        if found:
            self._sizes.move_to_end(name)
        return found

    def names(self) -> list[str]:
        """All names."""
        return list(self._sizes)


class Namer:
    """The sender's side: names of grammars, whose texts go first where the other side does not have them."""

    def __init__(self, most: int = MOST_ON_SHELF) -> None:
        self._shelf = Shelf(most)
        self._names: dict[str, str] = {}  # text -> name; the same text object is found without reading it
        self._texts: dict[str, str] = {}

    def name(self, text: str, send: Callable[[str], None]) -> str:
        """The name of a grammar. ``send`` is called with it when the other side does not have it; nothing changes when that raises."""
        name = self._names.get(text)
        if name is not None and self._shelf.touch(name):
            return name
        name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        send(name)
        self._names[text], self._texts[name] = name, text
        _, gone = self._shelf.use(name, len(text))
        for old in gone:
            del self._names[self._texts.pop(old)]
        return name
