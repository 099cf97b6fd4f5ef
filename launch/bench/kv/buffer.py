"""A request's hot buffer, simulated: what a replacement policy sees, and what it misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .traces import Floats, Ints, Selection

NEVER = 1 << 40  # step of a next use that does not come


@dataclass
class View:
    """The buffer at one step, after its hits were found: what a policy may look at."""

    step: int
    held: Ints  # [rows], position of each row, -1: none
    used: Ints  # [rows], last step that used it
    filled: Ints  # [rows], step that it was fetched in
    unused: NDArray[np.bool_]  # [rows], not used by this step: may give way
    scores: Floats  # [positions], this step's index scores
    next_use: Ints  # [rows], step of the next use; for Belady's policy only

    @property
    def held_scores(self) -> Floats:
        """[rows] scores of what the rows hold; anything for empty rows."""
        return self.scores[np.maximum(self.held, 0)]


class Policy(Protocol):
    """Chooses victims: the rows with the lowest keys give way, among those that this step does not use."""

    name: str

    def keys(self, view: View) -> NDArray[np.floating]:
        """[rows] keys."""

    def evicted(self, view: View, victims: Ints) -> None:
        """Told which rows gave way."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares of chosen rows, in percent, means over the steps after the warm-up."""

    missed: float  # fetched while the step waits
    prefetched: float  # fetched beside it
    first: float  # missed in the first step


def simulate(
    trace: Sequence[Selection], rows: int, policy: Policy, *, warm_up: int = 0, prefetch: int = 0, start: Ints | None = None
) -> Outcome:
    """Run ``policy`` over ``trace`` with a buffer of ``rows`` rows.

    ``prefetch``: after each step so many next ranks are fetched as well, over rows with lower scores. ``start``: positions that
    the buffer begins with.

    Raises:
        ValueError: the buffer is smaller than a selection.
    """
    k, total = len(trace[0].chosen), len(trace[-1].scores)
    if rows < k:
        raise ValueError(f"a buffer of {rows} rows cannot hold the {k} rows of a step; give it at least {k}")
    if warm_up >= len(trace):
        raise ValueError(f"a warm-up of {warm_up} steps leaves nothing of a trace of {len(trace)}")
    buffer = _Buffer(rows, total, start)
    later = next_uses(trace, total)
    missed, prefetched = np.zeros(len(trace)), np.zeros(len(trace))
    for step, selection in enumerate(trace):
        missed[step] = buffer.step(step, selection, policy, later[step])
        if prefetch:
            prefetched[step] = buffer.prefetch(step, selection, prefetch)
    share = 100.0 / k
    return Outcome(
        missed=share * float(missed[warm_up:].mean()), prefetched=share * float(prefetched[warm_up:].mean()), first=share * missed[0]
    )


def next_uses(trace: Sequence[Selection], total: int) -> list[Ints]:
    """For every step, [k] the steps that choose its positions again."""
    following = np.full(total, NEVER, np.int64)
    found: list[Ints] = []
    for step in range(len(trace) - 1, -1, -1):
        found.append(following[trace[step].chosen])
        following[trace[step].chosen] = step
    return found[::-1]


class _Buffer:
    def __init__(self, rows: int, total: int, start: Ints | None) -> None:
        self.held, self.used, self.filled = (np.full(rows, -1, np.int64) for _ in range(3))
        self.row_of = np.full(total, -1, np.int64)
        self.next_use = np.full(total, NEVER, np.int64)
        if start is not None:
            first = start[:rows]
            self.held[: len(first)] = first
            self.row_of[first] = np.arange(len(first))

    def step(self, step: int, selection: Selection, policy: Policy, later: Ints) -> int:
        """Fetch what is missing; how many."""
        where = self.row_of[selection.chosen]
        self.used[where[where >= 0]] = step
        self.next_use[selection.chosen] = later
        missing = selection.chosen[where < 0]
        if len(missing):
            view = self._view(step, selection)
            keys = np.where(self.held < 0, -np.inf, policy.keys(view))
            victims = np.sort(np.argsort(np.where(view.unused, keys, np.inf), kind="stable")[: len(missing)])
            policy.evicted(view, victims)
            self._replace(victims, missing, step)
            self.used[victims] = step
        return len(missing)

    def prefetch(self, step: int, selection: Selection, count: int) -> int:
        """Fetch the next ``count`` ranks over unused rows with lower scores; how many were fetched."""
        scores, k = selection.scores, len(selection.chosen)
        wanted = np.argpartition(scores, len(scores) - k - count)[len(scores) - k - count :]
        wanted = wanted[self.row_of[wanted] < 0]
        wanted = wanted[np.argsort(-scores[wanted], kind="stable")]
        view = self._view(step, selection)
        worth = np.where(self.held < 0, -np.inf, view.held_scores)
        victims = np.argsort(np.where(view.unused, worth, np.inf), kind="stable")[: len(wanted)]
        better = view.unused[victims] & (worth[victims] < scores[wanted[: len(victims)]])
        self._replace(victims[better], wanted[: len(victims)][better], step)
        return int(better.sum())

    def _view(self, step: int, selection: Selection) -> View:
        next_use = self.next_use[np.maximum(self.held, 0)]
        return View(step, self.held, self.used, self.filled, self.used < step, selection.scores, next_use)

    def _replace(self, victims: Ints, positions: Ints, step: int) -> None:
        old = self.held[victims]
        self.row_of[old[old >= 0]] = -1
        self.held[victims] = positions
        self.row_of[positions] = victims
        self.filled[victims] = step
