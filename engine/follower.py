"""Ranks of a replica that do not lead: they run the plans their leader sends."""

from __future__ import annotations

from collections.abc import Callable

from ..parallel.mailbox import Mailbox
from .codec import decode_plan
from .messages import CONTROL, END, FAIL, KEEP, Ask, Refusal, decode_ask
from .runner import Runner


def follow(plans: Mailbox, runner: Runner, answer: Callable[[Ask], None] | None = None) -> None:
    """Run plans until the leader ends the loop. ``answer`` is for questions to all ranks.

    Raises:
        Refusal: the front refused the call; the message is the same on every rank.
    """
    while True:
        message = plans.take()
        kind, body = message[:1], message[1:]
        if kind == END:
            runner.drain()
            return
        if kind == FAIL:
            raise Refusal(body.decode())
        if kind == CONTROL:
            assert answer is not None, "nobody is there to answer a question to all ranks"
            answer(decode_ask(body))
        elif kind != KEEP:
            runner.execute(decode_plan(body))
