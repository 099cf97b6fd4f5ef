"""Ranks of a replica that do not lead: they run the plans their leader sends."""

from __future__ import annotations

from ..parallel.mailbox import Mailbox
from .codec import decode_plan
from .messages import END, FAIL, Refusal
from .runner import Runner


def follow(plans: Mailbox, runner: Runner) -> None:
    """Run plans until the leader ends the loop.

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
        runner.execute(decode_plan(body))
