"""Replacement policies of a hot buffer. All but Belady's need no more than what the device has: positions, stamps, scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .buffer import Policy, View
from .traces import Floats, Ints

Keys = NDArray[np.floating]


class Plain:
    """A policy whose keys follow from the view alone."""

    def __init__(self, name: str, keys: Callable[[View], NDArray[np.generic]]) -> None:
        self.name, self._keys = name, keys

    def keys(self, view: View) -> Keys:
        """[rows] keys, lowest first to go."""
        return self._keys(view).astype(np.float64)

    def evicted(self, view: View, victims: Ints) -> None:
        """Nothing to remember."""


class Random(Plain):
    """Any row."""

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        super().__init__("random", lambda view: draw.random(len(view.held)))


class Clock:
    """Second chance: a hand passes over the rows, spares those used since it last came by, and takes the others."""

    name = "clock"

    def __init__(self) -> None:
        self.hand = 0
        self.passed: Ints | None = None  # step at which the hand last passed each row

    def keys(self, view: View) -> Keys:
        """Distance from the hand; a turn more for rows used since it passed."""
        rows = len(view.held)
        if self.passed is None:
            self.passed = np.full(rows, -1, np.int64)
        spared = view.used > self.passed
        return self._distance(rows) + rows * spared

    def evicted(self, view: View, victims: Ints) -> None:
        """Move the hand behind the last victim."""
        assert self.passed is not None
        rows = len(view.held)
        distance = self._distance(rows)
        spared = view.used[victims] > self.passed[victims]
        if spared.any():  # a whole turn, and a part of the next
            last, reached = int(distance[victims[spared]].max()), np.ones(rows, bool)
        else:
            last = int(distance[victims].max())
            reached = distance <= last
        self.passed[reached] = view.step
        self.hand = (self.hand + last + 1) % rows

    def _distance(self, rows: int) -> Keys:
        return ((np.arange(rows) - self.hand) % rows).astype(np.float64)


class Averaged:
    """Lowest running average of the scores, above the lowest score chosen; a row begins with its score when it is fetched."""

    def __init__(self, share: float) -> None:
        self.name, self.share = f"score, average {share:g}", share
        self.mean: Floats | None = None

    def keys(self, view: View) -> Keys:
        """The averages after this step's scores."""
        level = view.scores[view.held[~view.unused & (view.held >= 0)]]
        now = view.held_scores - (level.min() if len(level) else np.float32(0.0))
        if self.mean is None:
            self.mean = now
        fresh = view.filled >= view.step - 1
        self.mean = np.where(fresh, now, self.mean + np.float32(self.share) * (now - self.mean))
        return self.mean.astype(np.float64)

    def evicted(self, view: View, victims: Ints) -> None:
        """Nothing: what is fetched begins anew."""


class Filtered:
    """Lowest estimate of the part of a score that lasts: a row begins with ``prior`` of its score, and follows later ones by ``gains``."""

    def __init__(self, prior: float, gains: tuple[float, ...]) -> None:
        self.name = f"score, filtered {prior:g}, {gains[0]:g} .. {gains[-1]:g}"
        self.prior, self.gains = prior, np.array(gains, np.float32)
        self.estimate: Floats | None = None

    def keys(self, view: View) -> Keys:
        """The estimates after this step's scores."""
        now, age = view.held_scores, view.step - view.filled
        if self.estimate is None:
            self.estimate = now * np.float32(self.prior)
        gain = self.gains[np.clip(age - 2, 0, len(self.gains) - 1)]
        followed = self.estimate + gain * (now - self.estimate)
        self.estimate = np.where(age <= 1, now * np.float32(self.prior), followed)
        return self.estimate.astype(np.float64)

    def evicted(self, view: View, victims: Ints) -> None:
        """Nothing: what is fetched begins anew."""


class Counted:
    """Lowest score, where a row is worth more the more steps have used it: ``bonus`` of their number, given when each is seen."""

    def __init__(self, name: str, bonus: Callable[[Ints], NDArray[np.floating]]) -> None:
        self.name, self._bonus = name, bonus
        self.uses: Ints | None = None

    def keys(self, view: View) -> Keys:
        """Scores and bonuses."""
        if self.uses is None:
            self.uses = np.zeros(len(view.held), np.int64)
        self.uses += view.used == view.step
        keys: Keys = (view.held_scores + self._bonus(self.uses)).astype(np.float64)
        return keys

    def evicted(self, view: View, victims: Ints) -> None:
        """What is fetched has been used once."""
        assert self.uses is not None
        self.uses[victims] = 1


def score(view: View) -> Floats:
    """The score that this step gives."""
    return view.held_scores


def levels(count: int) -> Callable[[View], NDArray[np.generic]]:
    """The score in ``count`` equal steps from the lowest to the highest of the rows that may give way."""

    def keys(view: View) -> NDArray[np.generic]:
        found = view.held_scores
        free = found[view.unused & (view.held >= 0)]
        low, high = (free.min(), free.max()) if len(free) else (0.0, 0.0)
        if high <= low:
            return np.zeros(len(found))
        return np.clip(np.floor((found - low) / (high - low) * count), 0, count - 1)

    return keys


def moved_on(view: View) -> Floats:
    """The score of the position before: what this row scores in the next step if choices move with the query."""
    return view.scores[np.maximum(view.held - 1, 0)]


def belady() -> Policy:
    """The row whose next use is farthest off: the bound of any policy, and of none that can be built."""
    return Plain("belady", lambda view: -view.next_use)


def lru() -> Policy:
    """The row used longest ago."""
    return Plain("lru", lambda view: view.used)


def best() -> Policy:
    """What the engine uses."""
    return Plain("score", score)


def all_policies() -> list[Policy]:
    """One of each, fresh."""
    return [
        lru(),
        Plain("fifo", lambda view: view.filled),
        Random(),
        Clock(),
        best(),
        Plain("score, 256 levels", levels(256)),
        Plain("score, 16 levels", levels(16)),
        Averaged(0.5),
        Averaged(0.2),
        Filtered(0.87, (0.5, 0.4, 0.35, 0.3)),
        Filtered(0.9, (0.7,)),
        Counted("score, second chance 0.1", lambda uses: 0.1 * (uses >= 2)),
        Counted("score + 0.05 log uses", lambda uses: 0.05 * np.log1p(np.minimum(uses, 30))),
        Plain("score in 8 steps, then age", lambda view: 100.0 * np.floor(8.0 * view.held_scores) - np.minimum(view.step - view.used, 50)),
        Plain("score - 0.02 age", lambda view: view.held_scores - 0.02 * np.minimum(view.step - view.used, 64)),
        Plain("score of the position before", moved_on),
        Plain("the higher of both", lambda view: np.maximum(view.held_scores, moved_on(view))),
        belady(),
    ]
