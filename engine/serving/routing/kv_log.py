"""The leader's side of KV routing: what its prefix tree stored and removed since the router heard of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .kv_events import KvBatch, encode_batch, pack

#: changes that are kept while nobody takes them; more are replaced by the whole list
MOST_PENDING = 100_000


class KvLog:
    """Collects changes of a prefix tree; ``take`` gives them as one message.

    A page that came and went counts once, by how it is now. When too much is pending, or after ``resync``, the next
    message holds all pages of the tree instead, so memory is bounded by the tree.
    """

    def __init__(self, everything: Callable[[], Iterable[int]], most_pending: int = MOST_PENDING) -> None:
        """``everything`` tells the hashes of all pages in the tree now."""
        self._everything = everything
        self._most = most_pending
        self._pending: dict[int, bool] = {}  # hash -> is in the tree
        self._whole = False
        self._seq = 0

    def stored(self, hashes: Sequence[int]) -> None:
        """Pages have come into the tree."""
        self._note(hashes, True)

    def removed(self, hashes: Sequence[int]) -> None:
        """Pages have left the tree."""
        self._note(hashes, False)

    def _note(self, hashes: Sequence[int], there: bool) -> None:
        if self._whole:
            return
        for value in hashes:
            self._pending[value] = there
        if len(self._pending) > self._most:
            self.resync()

    def resync(self) -> None:
        """The next message tells everything."""
        self._pending.clear()
        self._whole = True

    def take(self) -> bytes | None:
        """The next message; None when nothing has changed."""
        if not self._whole and not self._pending:
            return None
        if self._whole:
            batch = KvBatch(seq=self._seq, whole=True, stored=pack(self._everything()))
        else:
            stored = pack(h for h, there in self._pending.items() if there)
            batch = KvBatch(seq=self._seq, stored=stored, removed=pack(h for h, there in self._pending.items() if not there))
        self._seq, self._whole = self._seq + 1, False
        self._pending.clear()
        return encode_batch(batch)
