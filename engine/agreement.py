"""What the leaders of all replicas tell each other in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..parallel.group import Group
from .graph_key import decode_context
from .messages import Command, decode_commands, encode_commands
from .plan import StepPlan
from .records import Event, Report, decode_report, encode_report


@dataclass(kw_only=True)
class Agreed:
    """What comes of it, the same on all leaders but for ``events``."""

    events: list[Event]  # on rank 0: of all replicas
    quiet: bool  # no replica has anything to do or to tell
    done: bool  # nor will it


def alone(plan: StepPlan, outbox: list[Event], *, has_work: bool, more: bool) -> Agreed:
    """``agree`` where there is one replica; its commands and notes need no way."""
    plan.dp_tokens = np.array([plan.n_tokens], dtype=np.int32)
    plan.dp_context = np.array([decode_context(plan)], dtype=np.int32)
    plan.dp_offloaded = np.array([plan.offloaded], dtype=np.int32)
    quiet = not (outbox or has_work)
    return Agreed(events=outbox, quiet=quiet, done=quiet and not more)


def agree(
    leaders: Group,
    plan: StepPlan,
    outbox: list[Event],
    notes: dict[str, Any],
    commands: list[Command],
    *,
    has_work: bool,
    more: bool,
    take: Callable[[Command], None],
    hear: Callable[[int, dict[str, Any]], None],
) -> Agreed:
    """The leaders' only exchange: sizes first, then news down and events up where there are any. Fills in the plan's agreed numbers.

    Args:
        outbox: events of this replica.
        notes: of this replica, for rank 0.
        commands: rank 0's news; [] elsewhere.
        has_work: this replica has.
        more: there may be more news; rank 0's value counts.
        take: called with every command.
        hear: rank 0: called with the notes of each replica.

    Raises:
        CollectiveError: a leader did not come within the group's deadline.
        Refusal: ``take`` raises it on every leader, for a ``Fail`` of rank 0.
    """
    front = leaders.index == 0
    news = encode_commands(commands) if front and commands else b""
    report = b"" if front or not (outbox or notes) else encode_report(Report(events=outbox, notes=notes))
    unfinished = [int(has_work), len(news), len(report), int(more or bool(outbox and front))]
    table = leaders.gather_ints([plan.n_tokens, decode_context(plan), *unfinished, int(plan.offloaded)])
    plan.dp_tokens, plan.dp_context, plan.dp_offloaded = (table[:, i].astype(np.int32) for i in (0, 1, 6))
    if table[0, 3]:
        for command in decode_commands(leaders.broadcast_bytes(news if front else None, 0)):
            take(command)
    if front:
        hear(0, notes)
    elif report:
        leaders.send_bytes(report, 0)
    collected = outbox if front else []
    for index in np.flatnonzero(table[:, 4]).tolist() if front else ():
        found = decode_report(leaders.recv_bytes(index))
        collected = collected + found.events
        hear(index, found.notes)
    quiet = not table[:, 2:5].any() and not (front and outbox)
    return Agreed(events=collected, quiet=quiet, done=not table[:, 2:6].any())
