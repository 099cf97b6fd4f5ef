"""Running calls on one rank: the front leads, other leaders tick along, followers follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..parallel.grid import Grid
from ..parallel.mailbox import Mailbox
from ..parallel.watchdog import guard
from .call import Params, Prompt
from .follower import follow
from .front import Front, StreamChunk
from .leader import Leader
from .messages import Command, Fail, Refusal
from .records import Event
from .runner import Runner


@contextmanager
def protected(grid: Grid, *, shared: type[ValueError] = ValueError, close: bool = False) -> Iterator[None]:
    """An error inside ends all ranks at once, unless it is one that every rank has (``shared``) or the caller stopped early.

    ``close`` gives the process groups back on a shared error, for errors after which there is no engine.
    """
    try:
        yield
    except shared:
        if close:
            grid.close()
        raise
    except GeneratorExit:
        raise
    except BaseException:
        with guard(grid):
            raise


class Driver:
    """What one rank does in a call. ``run`` is collective: every rank calls it with its prompts, rank 0's count."""

    def __init__(self, *, grid: Grid, runner: Runner, plans: Mailbox, leader: Leader | None, front: Front | None, debug: bool) -> None:
        self.grid = grid
        self.runner = runner
        self.plans = plans
        self.leader = leader
        self.front = front
        self.debug = debug
        self._commands: list[Command] = []  # news of the front, for the next tick

    def run(self, prompts: Sequence[Prompt], params: Params, priority: Sequence[int] | None) -> Iterator[StreamChunk]:
        """Run one call to its end. Rank 0 yields what is new; the other ranks work and yield nothing.

        Raises:
            Refusal: on every rank, when rank 0's prompts are refused.
        """
        with protected(self.grid, shared=Refusal):
            if self.leader is None:
                follow(self.plans, self.runner)
            elif self.front is None:
                self._lead_others()
            else:
                yield from self._lead_front(prompts, params, priority)

    def _submit(self, prompts: Sequence[Prompt], params: Params, priority: Sequence[int] | None) -> list[Command]:
        assert self.front is not None and self.leader is not None
        adds = self.front.submit(prompts, params, priority)
        try:
            for add in adds:
                self.leader.scheduler.validate(add.request())
        except ValueError:
            self.front.withdraw(adds)
            raise
        return list(adds)

    def _lead_front(self, prompts: Sequence[Prompt], params: Params, priority: Sequence[int] | None) -> Iterator[StreamChunk]:
        front, leader = self.front, self.leader
        assert front is not None and leader is not None
        try:
            self._commands = self._submit(prompts, params, priority)
        except ValueError as error:
            self._refuse(str(error))
            raise Refusal(str(error)) from None
        done = False
        try:
            while not done:
                events, done = self._tick()
                yield from front.chunks(events)
        except GeneratorExit:  # the caller stopped early: end what runs, then let the other ranks go
            self._commands.extend(front.aborts())
            while not done:
                events, done = self._tick()
                front.chunks(events)
            self.end()
            raise
        self.end()

    def _tick(self) -> tuple[list[Event], bool]:
        assert self.front is not None and self.leader is not None
        commands, self._commands = self._commands, []
        return self.leader.tick(commands, more=bool(self._commands) or self.front.open)

    def _lead_others(self) -> None:
        assert self.leader is not None
        done = False
        try:
            while not done:
                _, done = self.leader.tick([], more=False)
        except Refusal as error:
            self.leader.line.end(str(error))
            raise
        self.end()

    def _refuse(self, message: str) -> None:
        """Carry rank 0's refusal to every rank."""
        assert self.leader is not None
        if self.grid.spec.dp > 1:
            try:
                self.leader.tick([Fail(message=message)], more=True)
            except Refusal:
                pass
        self.leader.line.end(message)

    def end(self) -> None:
        """The loop is over for all replicas: let this one's other ranks go (leaders)."""
        assert self.leader is not None
        self.leader.line.end()
        self.runner.drain()
        if self.debug:
            with self.leader.at_work:
                self.leader.scheduler.check()

    def abort(self, request_id: str | None = None) -> None:
        """Abort one request of the running call, or all (rank 0)."""
        if self.front is not None:
            self._commands.extend(self.front.aborts(request_id))
