"""Whether the exchanges of a step went well, known before its tokens are given out; the device is never waited for in between."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch

from ..comm.dispatcher import Dispatcher
from ..comm.state import N_STATUS, Status
from ..comm.timeout import DispatchTimeout
from ..parallel.grid import Grid
from ..parallel.group import Group
from .streams import HostCopy, Streams

log = logging.getLogger("rorqual")


class Place(Enum):
    """What becomes of a rank's results of a step."""

    GIVES = "gives"  # it gives tokens out, or to those who do: once they are confirmed
    PASSES_ON = "passes on"  # hidden states go to the next stage: they are confirmed before, which waits for the device
    FOLLOWS = "follows"  # others of its replica give them out

    @classmethod
    def of(cls, grid: Grid) -> Place:
        """Of this rank."""
        if grid.is_leader or (grid.is_last_stage and grid.spec.pp > 1):
            return cls.GIVES
        return cls.FOLLOWS if grid.is_first_stage else cls.PASSES_ON


class Unwatched:
    """Where nothing is exchanged that could be missed."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Nothing changes inside."""
        return nullcontext()

    def launched(self, step: int) -> None:
        """Nothing is to be known."""

    def confirm(self, step: int) -> None:
        """Results are good."""

    def ended(self, step: int) -> None:
        """It ended well."""


class ExchangeWatch:
    """Looks after the dispatcher of one rank, whose waits end on the device with words that nobody sees by themselves.

    A rank whose wait failed sends nothing from then on, so all others miss it in turn: no rank goes on with wrong sums.
    """

    def __init__(self, dispatcher: Dispatcher, streams: Streams, tp: Group, place: Place) -> None:
        """``tp``: the ranks whose results are part of this rank's. ``place``: what becomes of its results."""
        self._dispatcher, self._streams, self._tp, self._place = dispatcher, streams, tp, place
        self._coming: dict[int, HostCopy] = {}  # words of this rank, or of all of ``tp``, behind a step
        self._told: set[int] = set()  # ranks that are known to be left out

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the launch of a step.

        Raises:
            RuntimeError: another rank was missed, in this step or in an earlier one; with step, layer, phase, epoch and ranks.
        """
        with naming(step):
            self._dispatcher.health()
            yield

    def launched(self, step: int) -> None:
        """The layers of a step that samples are launched: bring down what they leave behind. Collective over ``tp``."""
        status = self._dispatcher.status
        if status is None:
            return
        words = status if self._tp.size == 1 else self._tp.all_gather(status.view(1, -1))
        if self._place is not Place.FOLLOWS:
            self._coming[step] = self._streams.download(words)
        if self._place is Place.PASSES_ON:  # nobody else learns it
            self.confirm(step)

    def confirm(self, step: int) -> None:
        """The results of ``step`` are about to be used; waits for its words, which come with them.

        Raises:
            RuntimeError: they are not to be used.
        """
        for earlier in [known for known in self._coming if known < step]:
            del self._coming[earlier]  # nobody asked for its results; a failure would be in the words of this step too
        copy = self._coming.pop(step, None)
        if copy is None:
            return
        table = copy.wait().view(-1, N_STATUS)
        mine = table[0] if len(table) == 1 else table[self._tp.index]
        with naming(step):
            error = self._dispatcher.verdict(mine.tolist())
            if error is not None:
                raise error
        if self._dispatcher.spec.fault_tolerant:
            self._tell(mine.tolist())
        else:
            self._check_others(step, table)

    def ended(self, step: int) -> None:
        """A step without results is to have run on the device; waits for it.

        Raises:
            RuntimeError: another rank was missed.
        """
        with naming(step):
            self._dispatcher.health(wait=True)

    def _tell(self, words: list[int]) -> None:
        """Say once of a rank that it is left out."""
        missing = self._dispatcher.group.ranks[words[Status.MISSING]]
        if words[Status.FAILED] and missing not in self._told:
            self._told.add(missing)
            log.warning(
                "rank %d did not answer in time: it is left out, and its experts add nothing from now on; "
                "so do those of ranks that are lost later, which only Dispatcher.active_mask tells", missing
            )  # fmt: skip

    def _check_others(self, step: int, table: torch.Tensor) -> None:
        bad = [rank for rank, words in zip(self._tp.ranks, table.tolist(), strict=False) if words[Status.FAILED]]
        if bad:
            raise RuntimeError(f"step {step}: an exchange of experts failed on rank {bad[0]}, which shares this rank's requests")


@contextmanager
def naming(step: int) -> Iterator[None]:
    """Say of a missed exchange inside at which step and layer it was."""
    try:
        yield
    except DispatchTimeout as error:
        raise RuntimeError(f"step {step}, layer {error.tag}: {error}") from error
