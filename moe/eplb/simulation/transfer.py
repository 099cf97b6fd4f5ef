"""Experts on their way beside the steps: layer by layer, so many bytes a rank and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..topology import Ints


@dataclass(frozen=True, kw_only=True)
class Part:
    """What travelled during one step."""

    arrived: tuple[int, ...]  # layers whose last byte came during the step
    bytes_of_a_rank: int  # that the rank with most of them received
    bytes: int  # that all ranks received


class Transfer:
    """Layers are sent one after the other; a layer is switched when the rank with most to receive has all of it."""

    def __init__(self, slots: Ints, coming: Ints, *, order: Sequence[int], expert_bytes: int) -> None:
        """Slots [layers, slots] to reach, experts coming [layers, ranks], layers in the order in which they are sent."""
        self.slots = slots
        self._waiting = list(order)
        self._longest = coming.max(1) * expert_bytes  # [layers] bytes of the rank with most to receive
        self._all = coming.sum(1) * expert_bytes  # [layers] bytes of all ranks
        self._sent = 0  # bytes of the first waiting layer that its slowest rank has

    @property
    def done(self) -> bool:
        """Every layer has arrived."""
        return not self._waiting

    def advance(self, budget: int) -> Part:
        """Send for one step: at most ``budget`` bytes to a rank."""
        arrived, left, total = [], budget, 0
        while self._waiting:
            layer = self._waiting[0]
            need = int(self._longest[layer]) - self._sent
            now = min(need, left)
            left -= now
            total += self._portion(layer, self._sent + now) - self._portion(layer, self._sent)
            self._sent += now
            if now < need:
                break
            arrived.append(self._waiting.pop(0))
            self._sent = 0
        return Part(arrived=tuple(arrived), bytes_of_a_rank=budget - left, bytes=total)

    def _portion(self, layer: int, sent: int) -> int:
        """Bytes of all ranks when the slowest has ``sent``: ranks receive side by side, each its part of its own."""
        longest = int(self._longest[layer])
        return 0 if longest == 0 else int(self._all[layer]) * sent // longest
