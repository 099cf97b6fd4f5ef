"""A leader's line to the other ranks of its replica: what it posts there, and ``follow`` reads."""

from __future__ import annotations

import time

from ..parallel.mailbox import Mailbox
from .codec import encode_plan
from .messages import CONTROL, END, FAIL, KEEP, PLAN, Ask, encode_ask
from .plan import StepPlan

#: seconds between two signs of life of an idle leader, unless the deadline asks for more
_KEEP_S = 1.0


class ReplicaLine:
    """Posts without waiting for readers; nothing happens where the leader is its replica's only rank."""

    def __init__(self, plans: Mailbox) -> None:
        self._plans = plans
        self._posted = 0.0  # time.monotonic() of the last message

    @property
    def has_readers(self) -> bool:
        """Whether the replica has other ranks."""
        return self._plans.group.size > 1

    def run(self, plan: StepPlan) -> None:
        """Run ``plan``."""
        self._post(PLAN + encode_plan(plan))

    def ask(self, ask: Ask) -> None:
        """Answer a question to all ranks, between two steps."""
        self._post(CONTROL + encode_ask(ask))

    def keep(self) -> None:
        """Say now and then that nothing is wrong, or their deadline would pass while all are idle."""
        if self.has_readers and time.monotonic() - self._posted > min(_KEEP_S, self._plans.group.deadline_s / 8):
            self._post(KEEP)

    def end(self, message: str | None = None) -> None:
        """The loop is over, with an error message if there is one. Returns when all messages have left."""
        self._post(END if message is None else FAIL + message.encode())
        self._plans.drain()

    def _post(self, message: bytes) -> None:
        if self.has_readers:
            self._plans.post(message)
            self._posted = time.monotonic()
