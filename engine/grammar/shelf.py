"""Compiled grammars by name, so that the megabytes of one travel once and not with every request that has it."""

from __future__ import annotations

from collections import Counter

from ..messages import Command, DropGrammar, KeepGrammar
from .guides import Guides
from .names import Shelf


class Shelves:
    """Rank 0: what each HTTP process may call by name, and what all leaders are told to keep for it."""

    def __init__(self, guides: Guides) -> None:
        """``guides`` of this rank, which has to know a grammar before the next tick."""
        self._guides = guides
        self._shelves: dict[bytes, Shelf] = {}
        self._holders: Counter[str] = Counter()  # name -> processes that have it on their shelf

    def put(self, peer: bytes, name: str, text: str) -> list[Command]:
        """A process sends a grammar that it will call ``name``: what the leaders have to do."""
        shelf = self._shelves.setdefault(peer, Shelf())
        new, gone = shelf.use(name, len(text))
        self._holders[name] += new
        self._guides.keep(name, text)
        return [KeepGrammar(name=name, text=text), *self._drop(gone)]

    def has(self, peer: bytes, name: str) -> bool:
        """Whether a process may use ``name`` in a request, which it does now."""
        shelf = self._shelves.get(peer)
        return shelf is not None and shelf.touch(name)

    def forget(self, peer: bytes) -> list[Command]:
        """A process is gone."""
        shelf = self._shelves.pop(peer, None)
        return [] if shelf is None else self._drop(shelf.names())

    def _drop(self, names: list[str]) -> list[Command]:
        self._holders.subtract(names)
        gone = [name for name in names if not self._holders[name]]
        for name in gone:
            del self._holders[name]
        return [DropGrammar(name=name) for name in gone]
