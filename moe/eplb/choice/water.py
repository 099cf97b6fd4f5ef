"""How the tokens of a step are split over replicas so that the busiest rank has least: water filling.

The split is that of the linear program ``minimise t, sum of x over an expert's slots = its tokens, sum of x on a rank <= t * speed``.
Its solution also has the least sum of squared loads, because an expert's tokens can be anything that its ranks together hold
(a polymatroid). Squares are minimised expert by expert: given what the others put on its ranks, an expert fills these like
water, up to one level. Experts with no rank in common do so at once (a colour), over all layers together.

How far a split is from the best is known without a solver: the tokens of experts that live on some ranks only have to go
there, whatever the split. The ranks above a level, for every level, give the bound (the dual of the program).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Floats
from ..topology import Ints, Topology
from .seats import Seats

_FULL = 1e300  # load of the rank that stands for none: nothing is ever put there
#: every other round goes further than level, which evens out long ways sooner (successive over-relaxation; stable below 2)
_BEYOND = (1.0, 1.6, 1.6, 1.9)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A split of tokens over slots."""

    split: Floats  # [layers, slots] tokens that each slot gets
    level: Floats  # [layers] tokens of the busiest rank over its speed
    bound: Floats  # [layers] no split of these tokens over these slots has less

    @property
    def gap(self) -> Floats:
        """[layers] level above the bound, as a part of it; 0 for a layer without tokens."""
        return np.where(self.bound > 0, self.level / np.where(self.bound > 0, self.bound, 1.0) - 1.0, 0.0)


class WaterFill:
    """Splits for one placement, made once and used for every step's counts."""

    def __init__(self, slot_to_expert: Ints, n_experts: int, topology: Topology) -> None:
        """Placement [layers, slots], -1 for empty; an expert may have no slot as long as it has no tokens.

        Raises:
            ValueError: another number of slots than the topology's.
        """
        self._seats = Seats.find(slot_to_expert, n_experts, topology)
        self._speeds = np.ones(topology.n_ranks) if topology.speeds is None else np.array(topology.speeds)

    def fill(self, counts: Ints | Floats, *, gap: float = 0.009, most_sweeps: int = 400) -> Filled:
        """Split counts [layers, experts].

        Args:
            counts: tokens of all ranks together.
            gap: distance from the bound, as a part of it, at which a split is good enough.
            most_sweeps: rounds over all experts after which it is left as it is.

        Raises:
            ValueError: another shape, or tokens for an expert that has no slot.
        """
        whole, flat = self._seats, self._checked(counts)
        work = _Work.begin(whole, flat, self._speeds)
        of_seat, level, bound = whole.seated(flat), np.zeros(whole.n_layers), np.zeros(whole.n_layers)
        layers = np.arange(whole.n_layers)  # those that are not done
        for pair in range(-(-most_sweeps // 2)):
            work.sweep(_BEYOND[min(pair, len(_BEYOND) - 1)])
            work.sweep()
            if pair >= len(_BEYOND) and pair % 2:
                continue  # few layers are left, and these take long: looking costs as much as a round
            level[layers], least = work.level_and_bound()
            bound[layers] = np.maximum(bound[layers], least)
            far = level[layers] > bound[layers] * (1.0 + gap)
            if not far.any():
                break
            if 4 * far.sum() <= len(layers):  # a few are left: go on with them alone
                work.keep(of_seat)
                work, layers = work.of_layers(np.flatnonzero(far)), layers[far]
        else:
            level[layers] = work.level_and_bound()[0]
        work.keep(of_seat)
        return Filled(split=whole.slots(of_seat), level=level, bound=bound)

    def _checked(self, counts: Ints | Floats) -> Floats:
        seats = self._seats
        if counts.shape != (seats.n_layers, seats.n_experts):
            raise ValueError(f"water filling: counts must be [{seats.n_layers}, {seats.n_experts}], found {list(counts.shape)}")
        flat = np.asarray(counts, dtype=np.float64).reshape(-1)
        if flat[seats.absent].any():
            layer, expert = divmod(int(seats.absent[flat[seats.absent] > 0][0]), seats.n_experts)
            raise ValueError(f"water filling: layer {layer} has tokens for expert {expert}, which has no slot")
        return flat


class _Work:
    """Loads and parts of some layers on the way to the best split."""

    def __init__(self, seats: Seats, alone: Floats, tokens: list[Floats], parts: list[Floats], speeds: Floats) -> None:
        """alone [layers, ranks] tokens that have no choice; of each group its tokens [n] and parts [w, n]."""
        self.seats, self.alone, self.tokens, self.parts, self.speeds = seats, alone, tokens, parts, speeds
        self.even = bool((speeds == speeds[0]).all())
        self.loads = np.append(alone, _FULL)  # [layers * ranks + 1]
        for group, part in zip(seats.groups, parts, strict=True):
            self.loads[group.cell] += part  # a rank is there once at most

    @classmethod
    def begin(cls, seats: Seats, flat: Floats, speeds: Floats) -> _Work:
        """The even split of ``flat`` [layers * experts]."""
        tokens = [flat[group.expert] for group in seats.groups]
        parts = [some * group.start for some, group in zip(tokens, seats.groups, strict=True)]
        return cls(seats, seats.rank_sums(flat).reshape(seats.n_layers, -1), tokens, parts, speeds)

    def of_layers(self, kept: Ints) -> _Work:
        """The same for some of the layers."""
        seats, tokens, parts = self.seats.of_layers(kept, self.tokens, self.parts)
        return _Work(seats, self.alone[kept], tokens, parts, self.speeds)

    def keep(self, of_seat: Floats) -> None:
        """Write the parts to [seats + 1]."""
        for group, part in zip(self.seats.groups, self.parts, strict=True):
            of_seat[group.seat] = part

    def sweep(self, beyond: float = 1.0) -> None:
        """Every expert fills its ranks once, up to a level; with ``beyond`` above 1 it changes its parts by so much more."""
        loads = self.loads
        for at, group in enumerate(self.seats.groups):
            others = loads[group.cell] - self.parts[at]
            level = _level(others, self.tokens[at]) if self.even else _level_by_speed(others, self.tokens[at], group.speed)
            top = np.maximum(level if self.even else level * group.speed, others)
            part = top - others
            if beyond != 1.0:
                part = np.maximum(self.parts[at] + beyond * (part - self.parts[at]), 0.0)
                part *= self.tokens[at] / np.maximum(part.sum(0), 1e-300)
                top = others + part
            self.parts[at] = part
            loads[group.cell] = top

    def level_and_bound(self) -> tuple[Floats, Floats]:
        """[layers] level of the busiest rank, and the most that ranks above a level must hold, over their speeds, for the best level."""
        levels = self.loads[:-1].reshape(self.seats.n_layers, -1) / self.speeds
        layers, ranks = levels.shape
        order = np.argsort(-levels, axis=1)
        row = np.arange(layers)[:, None] * ranks
        place = np.full(layers * ranks + 1, -1)
        place[row + order] = np.arange(ranks)
        last = [group.cell[0] // ranks * ranks + place[group.cell].max(0) for group in self.seats.groups]
        inside = self.alone[np.arange(layers)[:, None], order]
        if last:  # an expert has to go to the first k ranks if the last of its own is among them
            inside = inside + np.bincount(np.concatenate(last), np.concatenate(self.tokens), layers * ranks).reshape(layers, ranks)
        inside = inside.cumsum(1)
        bound: Floats = (inside / self.speeds[order].cumsum(1)).max(1)
        return levels.max(1), bound


def water_fill(counts: Ints | Floats, slot_to_expert: Ints, topology: Topology, **more: float) -> Floats:
    """Tokens of every slot [layers, slots] for counts [layers, experts]; ``WaterFill`` keeps what a placement needs for all its steps."""
    filled: Floats = WaterFill(slot_to_expert, counts.shape[1], topology).fill(counts, **more).split  # type: ignore[arg-type]
    return filled


def _level(others: Floats, tokens: Floats) -> Floats:
    """Level [n] to which tokens [n] fill ranks that hold ``others`` [w, n] already.

    Over the k emptiest ranks they would come to (tokens + what those hold) / k; the k that is meant makes this least.
    """
    if len(others) == 2:
        one, other = others
        level: Floats = np.minimum(np.minimum(one, other) + tokens, (one + other + tokens) * 0.5)
        return level
    filled = np.sort(others, axis=0).cumsum(0) + tokens
    filled /= np.arange(1, len(others) + 1)[:, None]
    lowest: Floats = filled.min(0)
    return lowest


def _level_by_speed(others: Floats, tokens: Floats, speeds: Floats) -> Floats:
    """The same for ranks of ``speeds`` [w, n], levels being tokens over speed."""
    order = np.argsort(others / speeds, axis=0)
    held = np.take_along_axis(others, order, 0).cumsum(0) + tokens
    lowest: Floats = (held / np.take_along_axis(speeds, order, 0).cumsum(0)).min(0)
    return lowest
