"""Second phase of a batch: staging buffers become slots, then tables change. It only goes forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from .points import Probe
from .program import Copy, Kind
from .staging import Staging
from .state import ExpertState

TRIES = 3
T = TypeVar("T")


class CommitError(RuntimeError):
    """A rank could not finish what all ranks have decided. Its placement is neither the old nor the new one: it must end."""


def forward(decision: Callable[[], T], probe: Probe) -> T:
    """``decision()``, a pure function of what all ranks know: tried again like a step of a commit, as the others go by it.

    Raises:
        CommitError: it failed ``TRIES`` times.
    """
    for tries in range(1, TRIES + 1):
        try:
            probe("decide")
            return decision()
        except Exception as error:
            if tries == TRIES:
                raise CommitError(f"what all ranks decided could not be found out in {TRIES} tries: {error}") from error
    raise AssertionError("unreachable")


@dataclass(kw_only=True)
class Commit:
    """The steps of one rank in order. A step that failed is done again: doing one twice is doing it once."""

    steps: list[tuple[str, Callable[[], None]]]  # name for errors, what it does
    done: int = 0  # steps that are finished

    def run(self, probe: Probe) -> None:
        """All steps, from the first that is not finished.

        Raises:
            CommitError: a step failed ``TRIES`` times.
        """
        tries = 0
        with torch.inference_mode():
            while True:
                try:
                    self._advance(probe)
                    return
                except Exception as error:
                    tries += 1
                    if tries == TRIES:
                        where = self.steps[self.done][0] if self.done < len(self.steps) else "the end"
                        raise CommitError(f"the commit failed {TRIES} times at its step {self.done} ({where}): {error}") from error

    def _advance(self, probe: Probe) -> None:
        while self.done < len(self.steps):
            name, step = self.steps[self.done]
            probe(name)
            step()
            if name == "commit-copy":
                probe("commit-copied")
            self.done += 1
        probe("commit-after")


def copy_steps(program: Sequence[Copy], states: Sequence[ExpertState], staging: Staging) -> list[tuple[str, Callable[[], None]]]:
    """The steps that carry out ``program``, then those that remake derived tensors of the slots that changed."""

    def copying(copy: Copy) -> Callable[[], None]:
        return lambda: _do(copy, states[copy.layer], staging)

    def deriving(layer: int, slots: list[int]) -> Callable[[], None]:
        def remake_all() -> None:
            for remake in states[layer].derived:
                remake(slots)

        return remake_all

    steps: list[tuple[str, Callable[[], None]]] = [("commit-copy", copying(copy)) for copy in program]
    for layer in sorted({copy.layer for copy in program}):
        slots = sorted({copy.target for copy in program if copy.layer == layer and copy.kind is not Kind.SAVE})
        if states[layer].derived and slots:
            steps.append(("commit-derive", deriving(layer, slots)))
    return steps


def _do(copy: Copy, state: ExpertState, staging: Staging) -> None:
    if copy.kind is Kind.UNPACK:
        state.unpack(staging.payload(copy.source), copy.target)
    elif copy.kind is Kind.COPY:
        state.copy(copy.source, copy.target)
    elif copy.kind is Kind.SAVE:
        state.pack(copy.source, staging.payload(copy.target))
    else:
        state.clear(copy.target)
