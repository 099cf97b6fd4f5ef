"""Rank 0 while it serves: messages in, a step, pieces out."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from ...parallel.grid import Grid
from ..grammar.shelf import Shelves
from ..leader import Leader
from ..messages import Ask, Command, TellPrefixes
from ..records import Event
from .controls import Answer, Controls, merge
from .drain import Signals
from .front import ServeFront
from .link import FULL, Link
from .meter import Meter
from .peers import Keeper, Peers, mismatch
from .settings import ServeSettings
from .snapshot import Reporter
from .wire import Abort, Control, Down, Goodbye, Grammar, Hello, News, Refused, Reply, Submit, Up, Welcome

log = logging.getLogger("rorqual")

_SECOND_S = 1.0  # from one snapshot to the next
_READING_S = 0.02  # longest that a flood of messages may hold up the next step
_ABORTED = "the server is ending"
_GIVEN_UP = "this HTTP process gave no sign of life, and its requests were aborted"


class Server:
    """The loop of rank 0. ``run`` returns when the engine has ended in good order."""

    def __init__(
        self,
        *,
        grid: Grid,
        leader: Leader,
        front: ServeFront,
        link: Link,
        welcome: Welcome,
        meter: Meter,
        reporter: Reporter,
        settings: ServeSettings,
        idle_s: float,
        keeper: Keeper,
        for_good: bool = False,
    ) -> None:
        """
        Args:
            idle_s: longest sleep without a step.
            keeper: looks after HTTP processes.
            for_good: see ``Signals``.
        """
        self._grid = grid
        self._leader = leader
        self._front = front
        self._link = link
        self._welcome = welcome
        self._meter = meter
        self._reporter = reporter
        self._settings = settings
        self._idle_s = idle_s
        self._keeper = keeper
        self._for_good = for_good
        self._commands: list[Command] = []  # for the next tick
        self._shelves = Shelves(leader.guides)
        self._peers = Peers(settings.http_process_timeout)
        self._asked: deque[tuple[bytes, str]] = deque()  # (peer, control id) of questions on their way
        self._next_second = 0.0
        self._drain_until: float | None = None  # monotonic seconds; None while requests are taken
        self._closed = False  # the last step has run
        self._signals_seen = 0
        self._why = ""  # it ends
        leader.deliver = self._deliver
        leader.heard = self._heard

    # ---- the loop

    def run(self) -> None:
        """Serve until a signal asks for the end and the open requests have had theirs."""
        with Signals(self._grid.progress, for_good=self._for_good) as signals:
            self._link.wake_by(signals.descriptor)
            try:
                while not self._over:
                    self._turn(signals)
                self._closed = True
                for peer, message in self._link.receive(1.0):  # too late: they are told so
                    self._take(peer, message)
                self._say_all(Goodbye(phase="end", reason=self._why))
            except BaseException as error:
                self._say_all(Goodbye(phase="end", reason=f"{type(error).__name__}: {error}"))
                raise
            finally:
                self._link.forget_waker(signals.descriptor)

    @property
    def _over(self) -> bool:
        return self._drain_until is not None and not (self._front.open or self._commands or self._asked)

    def _turn(self, signals: Signals) -> None:
        if not (self._front.open or self._commands) and self._leader.quiet:
            self._link.wait(self._idle_s)
            signals.clear()
        if signals.count != self._signals_seen:
            self._asked_to_end(signals)
        for peer, message in self._link.receive(_READING_S):
            self._take(peer, message)
        commands, self._commands = self._commands, []
        events, _ = self._leader.tick(commands, more=True)
        if events:
            self._deliver(events)
        now = time.monotonic()
        if now >= self._next_second:
            self._each_second(now)
        if (snapshot := self._reporter.due(now)) is not None:
            self._say_all(snapshot)

    def _each_second(self, now: float) -> None:
        self._next_second = now + _SECOND_S
        self._keeper.every_second()
        for peer in self._peers.overdue(now):
            self._lose(peer, f"has given no sign of life for {self._settings.http_process_timeout:g} s", hung=True)
        watchdog = self._grid.watchdog
        if self._drain_until is None and watchdog is not None and (leaving := watchdog.leaving()):
            self.drain(f"rank {leaving[0]} was asked to end")
        self._reporter.extra["routing"] = self._front.router.snapshot()
        if self._drain_until is not None and now > self._drain_until and self._front.open:
            log.warning("%d completions have not ended within drain_timeout; they are aborted", self._front.n_open)
            self._commands.extend(self._front.aborts_of(None, _ABORTED))

    def _asked_to_end(self, signals: Signals) -> None:
        self._signals_seen = signals.count
        if self._drain_until is None:
            self.drain(signals.reason)
        else:
            log.warning("%s again: %d completions are aborted", signals.reason, self._front.n_open)
            self._commands.extend(self._front.aborts_of(None, _ABORTED))

    def drain(self, reason: str) -> None:
        """Take no more requests and end when the open ones have."""
        self._why = reason
        log.info("%s: ending, with %d completions to come first", reason, self._front.n_open)
        self._drain_until = time.monotonic() + self._settings.drain_timeout
        self._say_all(Goodbye(phase="drain", reason=reason))

    # ---- in

    def _take(self, peer: bytes, message: Up | ValueError) -> None:
        if not self._peers.heard(peer):
            self._link.send(peer, Goodbye(phase="end", reason=_GIVEN_UP))
        elif isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Grammar):
            self._commands.extend(self._shelves.put(peer, message.name, message.text))
        elif isinstance(message, Abort):
            self._commands.extend(self._front.aborts_of(None) if message.everything else self._front.aborts(message.request_ids))
        elif isinstance(message, Control):
            self._control(peer, message)
        elif isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, ValueError):
            log.warning("a message of an HTTP process cannot be read: %s", message)

    def _greet(self, peer: bytes, hello: Hello) -> None:
        for other in self._peers.before(peer, hello.name):
            self._lose(other, "was replaced")
        self._peers.meet(peer, hello.name)
        if (wrong := mismatch(hello)) is not None:
            self._say(peer, Goodbye(phase="end", reason=wrong))
            return
        self._say(peer, self._welcome)
        if self._drain_until is not None:
            self._say(peer, Goodbye(phase="drain", reason=_ABORTED))

    def _submit(self, peer: bytes, submit: Submit) -> None:
        if self._drain_until is not None:
            self._refuse(peer, Refused(request_id=submit.request_id, status=503, error=_ABORTED))
            return
        if submit.grammar is not None:
            self._shelves.has(peer, submit.grammar)  # it is in use; one that is not there is refused below
        made = self._front.submit(submit, peer)
        if isinstance(made, Refused):
            self._refuse(peer, made)
        else:
            self._commands.extend(made)

    def _refuse(self, peer: bytes, refused: Refused) -> None:
        self._meter.refused(refused.status)
        self._say(peer, refused)

    def _control(self, peer: bytes, control: Control) -> None:
        error = None
        if self._closed:
            error = _ABORTED
        elif control.name not in Controls.names:
            error = f"there is no {control.name!r}; known: {list(Controls.names)}"
        elif control.name == "flush_cache" and self._front.open:
            error = f"{self._front.n_open} completions run or wait; flush the cache when they have ended"
        if error is not None:
            self._say(peer, Reply(control_id=control.control_id, ok=False, error=error))
            return
        self._asked.append((peer, control.control_id))
        self._commands.append(Ask(name=control.name, args=control.args))

    def on_answers(self, ask: Ask, answers: list[Answer]) -> None:
        """All ranks have answered the oldest question."""
        peer, control_id = self._asked.popleft()
        try:
            reply = Reply(control_id=control_id, ok=True, body=merge(ask.name, answers))
        except ValueError as error:
            reply = Reply(control_id=control_id, ok=False, error=str(error))
        self._say(peer, reply)

    def _heard(self, dp_rank: int, name: str, value: Any) -> None:
        """What a leader's reporter has to tell."""
        if name == "numbers":
            self._reporter.take(dp_rank, value)
        elif name == "prefixes" and not self._front.router.heard(dp_rank, value):
            self._commands.append(TellPrefixes(dp_rank=dp_rank))

    # ---- out

    def _deliver(self, events: list[Event]) -> None:
        for peer, pieces in self._front.pieces(events).items():
            self._say(peer, News(pieces=pieces))

    def _say(self, peer: bytes, message: Down) -> None:
        if peer not in self._peers.given_up and (why := self._link.send(peer, message)) is not None:
            self._lose(peer, why, hung=why == FULL)

    def _say_all(self, message: Down) -> None:
        for peer in self._peers:
            self._say(peer, message)

    def _lose(self, peer: bytes, why: str, *, hung: bool = False) -> None:
        """Nobody waits for the requests of an HTTP process any more. One that is hung is replaced."""
        name = self._peers.name(peer)
        self._peers.drop(peer, give_up=hung)
        commands = self._front.aborts_of(peer)
        if commands or hung:
            log.warning("%s %s; its %d open completions are aborted", name or "an HTTP process", why, len(commands))
        if hung:
            self._keeper.replace(name, why)
        self._commands.extend(commands)
        self._commands.extend(self._shelves.forget(peer))
