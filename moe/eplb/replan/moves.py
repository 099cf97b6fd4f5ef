"""The single changes that a search may make next, each with what it gains and what it moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints
from .state import Bools, SearchState, excess

FREE = 0.25  # a change that moves nothing is rated as if it moved this much of an expert
_PARTNERS = 8  # ranks that an expert may be exchanged with at least: half of all, the least busy ones, where that is more


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The best change found of each layer: up to two slots and what they shall hold."""

    rating: Floats  # [B] gain for an expert moved; -inf: there is none
    slots: Ints  # [B, 2] slots to change; the second may repeat the first
    experts: Ints  # [B, 2] what they get

    def better_of(self, other: Changes) -> Changes:
        """Layer by layer whichever is rated higher."""
        mine = self.rating >= other.rating
        return Changes(
            rating=np.where(mine, self.rating, other.rating),
            slots=np.where(mine[:, None], self.slots, other.slots),
            experts=np.where(mine[:, None], self.experts, other.experts),
        )


class Candidates:
    """What all kinds of changes need of a state in which one rank of each layer is to be relieved."""

    def __init__(self, state: SearchState, rank: Ints) -> None:
        """rank [B]: the one to relieve, usable."""
        self.state, self.rank = state, rank
        self.rows = np.arange(len(rank))
        self.row = self.rows[:, None]
        self.ranks = state.topology.rank_of_slot
        self.own, self.own_valid = self._slots_of(rank[:, None])  # [B, K]
        self.own_expert = state.slots[self.row, self.own]
        self.own_valid &= self.own_expert != state.n_experts
        self.now = excess(state.parts)  # [B, R]
        self.own_now = self.now[self.rows, rank]
        self.own_parts = state.parts[:, self.rows, rank]  # [C, B]
        self.own_pace = state.pace[rank]
        self.own_holds = state.holds[self.rows, rank]  # [B, E + 1]
        self.own_had = state.had[self.rows, rank]

    def _slots_of(self, ranks: Ints) -> tuple[Ints, Bools]:
        """Slots of ranks [B, n] one after another, [B, n * widest rank], and which of these there are."""
        topology = self.state.topology
        widest = max(topology.slots)
        slots = topology.first_slot[ranks][:, :, None] + np.arange(widest)
        there = slots < topology.first_slot[ranks + 1][:, :, None]
        return np.where(there, slots, 0).reshape(len(ranks), -1), there.reshape(len(ranks), -1)

    def _pick(self, gain: npt.NDArray[np.floating], moves: npt.NDArray[np.integer], valid: Bools) -> tuple[Ints, Ints, Floats]:
        """Best of candidates [B, i, j], whose gain is overwritten: (i, j, rating), each [B]."""
        valid &= gain > 0
        gain /= np.maximum(moves, FREE, dtype=gain.dtype)
        gain *= valid
        flat = gain.reshape(len(gain), -1)
        best = flat.argmax(1)
        rating = flat[self.rows, best].astype(np.float64)
        return best // gain.shape[2], best % gain.shape[2], np.where(rating > 0, rating, -np.inf)

    def swap(self) -> Changes:
        """One of the rank's experts for that of a slot of a less busy rank, or for an empty slot; in single precision."""
        state, row, single = self.state, self.row, np.float32
        others = np.where(np.arange(state.topology.n_ranks) == self.rank[:, None], np.inf, state.ranking)
        n = max(_PARTNERS, state.topology.n_ranks // 2)
        partner = others.argsort(1)[:, :n]  # [B, n]
        cols, there = self._slots_of(partner)  # [B, Q]
        width = cols.shape[1] // partner.shape[1]
        there &= np.repeat(np.isfinite(others[row, partner]), width, axis=1)
        held, ranks = state.slots[row, cols], np.repeat(partner, width, axis=1)
        mine, theirs = state.values[:, row, self.own_expert].astype(single), state.values[:, row, held].astype(single)
        given = mine[..., None] - theirs[:, :, None]  # [C, B, K, Q]
        here = given * -self.own_pace.astype(single)[:, None, None]
        here += self.own_parts.astype(single)[:, :, None, None]
        given *= state.pace.astype(single)[ranks][:, None]
        given += state.parts[:, row, ranks].astype(single)[:, :, None]
        gain = (self.own_now[:, None] + self.now[row, ranks]).astype(single)[:, None] - excess(here)
        gain -= excess(given)
        there &= (self.own_holds[row, held] == 0) | (held == state.n_experts)
        absent = state.holds[row[:, None], partner[:, None], self.own_expert[:, :, None]] == 0  # [B, K, n]
        absent &= self.own_valid[:, :, None]
        valid = np.repeat(absent, width, axis=2) & there[:, None]
        if state.spread and state.grouped is not state.holds:
            valid &= self._stays_spread(held, state.groups[cols])
        i, j, rating = self._pick(gain, self._swap_moves(partner, held, ranks, width), valid)
        slots, experts = (self.own[self.rows, i], cols[self.rows, j]), (held[self.rows, j], self.own_expert[self.rows, i])
        return Changes(rating=rating, slots=np.stack(slots, 1), experts=np.stack(experts, 1))

    def _swap_moves(self, partner: Ints, held: Ints, ranks: Ints, width: int) -> npt.NDArray[np.int8]:
        """[B, K, Q] experts that a swap moves: arrivals at both ranks, less those that had been made and are taken back."""
        had = self.state.had.view(np.int8)
        mine = (
            self.own_had.view(np.int8)[self.row, self.own_expert][:, :, None]
            - had[self.row[:, None], partner[:, None], self.own_expert[:, :, None]]
        )
        theirs = had[self.row, ranks, held] - self.own_had.view(np.int8)[self.row, held]
        moves: npt.NDArray[np.int8] = np.repeat(mine, width, axis=2) + theirs[:, None]
        return moves

    def _stays_spread(self, held: Ints, groups: Ints) -> Bools:
        """[B, K, Q] whether a swap with slots of these groups leaves both experts on as many groups as before, or on two."""
        state, row = self.state, self.row
        distinct = (state.grouped > 0).sum(1)  # [B, E + 1]
        home = state.groups[state.topology.first_slot[self.rank]][:, None]  # [B, 1] group of the rank
        leaves = state.grouped[row, home, self.own_expert] == 1  # [B, K]
        comes = state.grouped[row[:, None], groups[:, None], self.own_expert[:, :, None]] == 0
        change = comes.astype(np.int8) - leaves[:, :, None].astype(np.int8)
        fine = (change >= 0) | (distinct[row, self.own_expert][:, :, None] + change >= 2)
        back = (state.grouped[row, home, held] == 0).astype(np.int8) - (state.grouped[row, groups, held] == 1)
        fine &= ((back >= 0) | (distinct[row, held] + back >= 2) | (held == state.n_experts))[:, None]
        stays: Bools = fine | (groups == home)[:, None]
        return stays

    def replicas(self) -> Changes:
        """One replica more of one of the rank's experts, or one fewer on the rank: whichever is rated higher."""
        self._tables()
        return self._add().better_of(self._drop())

    def _tables(self) -> None:
        """Sum over an expert's slots of the change of excess when it gets one replica more or fewer, and what of it each slot adds."""
        state, row = self.state, self.row
        held, width = state.slots, state.n_experts + 1
        parts, pace, now = state.parts[:, :, self.ranks], state.pace[self.ranks], self.now[:, self.ranks]
        keys = (row * width + held).ravel()

        def summed(after: Floats) -> tuple[Floats, Floats]:
            change = excess(parts + (after - state.values)[:, row, held] * pace) - now
            change[held == state.n_experts] = 0.0
            total = np.asarray(np.bincount(keys, weights=change.ravel(), minlength=len(row) * width), dtype=np.float64)
            return change.astype(np.float64, copy=False), total.reshape(len(row), width)

        _, self.gets_more = summed(state.more)
        self.slot_drops, self.gets_fewer = summed(state.fewer)
        reduces = state.grouped[row, state.groups, held] == 1
        left = (state.grouped > 0).sum(1)[row, held] - reduces
        redundant = state.counts[row, held] >= 2
        if state.spread:
            redundant &= ~reduces | (left >= 2) | ((state.counts[row, held] == 2) & (not state.everyone))
        redundant &= (state.fewer.max(0) * state.pace.max() <= 1.0)[row, held]  # no rank could hold what is left of it otherwise
        self.redundant = (redundant | (held == state.n_experts)) & state.topology.usable

    def _widens(self, groups: Ints, experts: Ints) -> Bools:
        """Whether a replica in these groups leaves the experts on two groups at least; both [B, ..], broadcast together."""
        row = self.rows.reshape(-1, *(1,) * (experts.ndim - 1))
        wide: Bools = (self.state.grouped > 0).sum(1)[row, experts] >= 2
        wide = wide | (self.state.grouped[row, groups, experts] == 0)
        return wide

    def _first(self, chosen: Bools) -> tuple[Ints, Bools]:
        """Indices [B, Q] of what is chosen [B, N], and which of them are meant: rows with fewer are filled up."""
        width = max(int(chosen.sum(1).max(initial=0)), 1)
        order = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
        return order, chosen[self.row, order]

    def _add(self) -> Changes:
        """A redundant slot elsewhere, or an empty one, becomes a replica of one of the rank's experts."""
        state, row = self.state, self.row
        order, takes = self._first(self.redundant & (self.ranks != self.rank[:, None]))  # [B, Q]
        held, ranks, own = state.slots[row, order], self.ranks[order], self.own_expert
        new, old = state.more[:, row, own][..., None], state.values[:, row, held][:, :, None]
        there = state.parts[:, row, ranks][:, :, None] + (new - old) * state.pace[ranks][:, None]  # [C, B, K, Q]
        others = self.gets_fewer[row, held] - self.slot_drops[row, order]
        gain = self.now[row, ranks][:, None] - excess(there) - self.gets_more[row, own][:, :, None] - others[:, None]
        place = (row[:, None], ranks[:, None], own[:, :, None])
        valid = self.own_valid[:, :, None] & takes[:, None] & (state.holds[place] == 0)
        if state.spread:
            valid &= self._widens(state.groups[order][:, None], own[:, :, None])
        moves = state.had[row, ranks, held].view(np.int8)[:, None] - state.had[place].view(np.int8)
        i, j, rating = self._pick(gain, moves, valid)
        return self._single(rating, order[self.rows, j], own[self.rows, i])

    def _drop(self) -> Changes:
        """A redundant slot of the rank becomes a replica of any expert that the rank does not hold, or empty."""
        state, row = self.state, self.row
        order, goes = self._first(self.redundant[row, self.own] & self.own_valid)  # [B, Q]
        own, held = self.own[row, order], self.own_expert[row, order]
        new = state.more[:, :, None].copy()  # [C, B, 1, E + 1]
        new[..., -1] = 0.0
        here = self.own_parts[:, :, None, None] + (new - state.values[:, row, held][..., None]) * self.own_pace[:, None, None]
        others = self.gets_fewer[row, held] - self.slot_drops[row, own]
        gain = self.own_now[:, None, None] - excess(here) - others[:, :, None] - self.gets_more[:, None]
        absent = self.own_holds == 0
        if state.spread:
            absent &= self._widens(state.groups[state.topology.first_slot[self.rank]][:, None], np.arange(state.n_experts + 1)[None])
        absent[:, -1] = True
        moves = self.own_had.view(np.int8)[row, held][:, :, None] - self.own_had.view(np.int8)[:, None]
        i, j, rating = self._pick(gain, moves, goes[:, :, None] & absent[:, None])
        return self._single(rating, own[self.rows, i], j)

    def detour(self, turn: Ints) -> tuple[Ints, Ints]:
        """A slot and what it shall hold, each [B], -1: none: the rank's largest expert in the slot of an expert that can spare it.

        The expert that gives it must stay lighter than the one that gets it was. The slots are tried in the order of how busy both end,
        layer by layer the one at place ``turn`` [B].
        """
        state, row = self.state, self.row
        self._tables()
        if state.objective.kind == "activated":  # replicas make no rank have fewer of these
            return np.full(len(row), -1), np.full(len(row), -1)
        expert = self.own_expert[self.rows, np.where(self.own_valid, state.values[0][row, self.own_expert], -1.0).argmax(1)][:, None]
        left = np.where(state.slots == state.n_experts, 0.0, state.fewer[0][row, state.slots])
        mine = state.values[0][row, expert]
        there = state.parts[0][:, self.ranks] + (state.more[0][row, expert] - state.values[0][row, state.slots]) * state.pace[self.ranks]
        valid = self.redundant & (state.holds[row, self.ranks, expert] == 0) & (left < mine) & (state.slots != expert)
        if state.spread:
            valid &= self._widens(state.groups[None], expert)
        order = np.where(valid, np.maximum(there, left), np.inf).argsort(1, kind="stable")
        slot = order[self.rows, np.minimum(turn, order.shape[1] - 1)]
        return np.where(valid[self.rows, slot], slot, -1), expert[:, 0]

    def _single(self, rating: Floats, slot: Ints, expert: Ints) -> Changes:
        return Changes(rating=rating, slots=np.stack([slot, slot], 1), experts=np.stack([expert, expert], 1))
