"""The ranks of a job agree before they connect: everybody is there, runs the same program with the same settings, at the same time.

What differs here would otherwise show as a hang, or as wrong sums, minutes later. Errors name hosts, ranks and values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from .clocks import ask_clock, serve_clock
from .interface import address_elsewhere, host_label
from .ranges import spans
from .roll_call import Record, call_roll, refuse
from .store import Rendezvous

PROTOCOL = 2  # of the messages between ranks; raised whenever one changes its meaning
_DECLINE_S = 5.0  # how long a rank that gives up tries to tell the others
_SHOWN = 4  # differences that a message lists


@dataclass(frozen=True, kw_only=True)
class Roll:
    """Who is there."""

    hosts: tuple[str, ...]  # label of every rank's host
    nodes: tuple[int, ...]  # number of every rank's node, as torchrun counts
    ranks: tuple[int, ...]  # how many ranks are on every rank's node
    address: str | None  # of the meeting as a host other than its own knows it; None where all find it on loopback
    clock_skew_s: float  # the largest difference of a host's clock from rank 0's that was seen

    @property
    def single_host(self) -> bool:
        """Whether all ranks were started on one node."""
        return len(set(zip(self.nodes, self.hosts, strict=True))) == 1

    @property
    def node_ranks(self) -> tuple[range, ...]:
        """Of every rank the ranks of its node, which have consecutive numbers; nodes may have different numbers of them."""
        found: list[range] = []
        while len(found) < len(self.ranks):
            first = len(found)
            here = range(first, min(first + self.ranks[first], len(self.ranks)))
            found += [here] * len(here)
        return tuple(found)

    def meeting_host(self, host: str, port: int) -> str:
        """``host``, of the meeting; where it is loopback, as a name is that /etc/hosts maps so, the address that other hosts found."""
        return host if self.address is None or address_elsewhere(host, port) else self.address


def muster(meeting: Rendezvous, prefix: str, facts: Mapping[str, Any], timeout_s: float, max_skew_s: float) -> Roll:
    """Meet all ranks and compare. Collective.

    Args:
        meeting: the job.
        prefix: of the keys in its store.
        facts: what has to be the same on all ranks, by name; values that JSON has.
        timeout_s: how long to wait for a rank.
        max_skew_s: how far clocks of hosts may be apart.

    Raises:
        ValueError: facts or clocks differ; the same text on all ranks.
        AbsentError: ranks did not come.
    """
    store = PrefixStore(f"{prefix}/muster", meeting.store)
    record: Record = {
        "host": host_label(meeting.host, meeting.port),
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "ranks": meeting.local_world_size,
        "address": address_elsewhere(meeting.host, meeting.port),
        "facts": {"message protocol": PROTOCOL, "torch": torch.__version__, **facts},
    }
    seen = call_roll(PrefixStore("roll", store), meeting.rank, meeting.world_size, record, _judge, timeout_s)
    hosts, nodes, ranks = (tuple(column) for column in zip(*seen["places"], strict=True))
    roll = Roll(hosts=hosts, nodes=nodes, ranks=ranks, address=seen["address"], clock_skew_s=0.0)
    askers = first_of_each_host(roll)[1:]
    if not askers:
        return roll
    skew = _compare_clocks(PrefixStore("clock", store), meeting, roll, askers, timeout_s, max_skew_s)
    return replace(roll, clock_skew_s=skew)


def first_of_each_host(roll: Roll) -> list[int]:
    """The lowest rank of every host."""
    places = list(zip(roll.nodes, roll.hosts, strict=True))
    return sorted({place: places.index(place) for place in places}.values())


def _judge(records: Sequence[Record]) -> dict[str, Any]:
    """Host, node, and number of ranks on it, of every rank; the address of the meeting. Raises ValueError naming what differs."""
    for rank, record in enumerate(records):
        if "declined" in record:
            raise ValueError(f"rank {rank} on {record['host']}: {record['declined']}")
    names = list(dict.fromkeys(name for record in records for name in record["facts"]))
    problems = [text for name in names if (text := _difference(name, records))]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        said = "; ".join(problems[:_SHOWN]) + more
        raise ValueError(f"the ranks of this job were not started alike: {said}. Use the same command and the same files on all nodes")
    address = next((record["address"] for record in records if record["address"]), None)
    return {"places": [(record["host"], record["node"], record["ranks"]) for record in records], "address": address}


def _difference(name: str, records: Sequence[Record]) -> str:
    """Who has which value of a fact; empty if all have the same."""
    values = [record["facts"].get(name) for record in records]
    if all(value == values[0] for value in values):
        return ""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    said = []
    for kind in kinds[:3]:
        ranks = [rank for rank, value in enumerate(values) if value == kind]
        hosts = list(dict.fromkeys(records[rank]["host"] for rank in ranks))
        said.append(f"{kind!r} on {', '.join(hosts[:3])}{' and others' if len(hosts) > 3 else ''} (ranks {spans(ranks)})")
    return f"{name} is {', '.join(said)}"


def _compare_clocks(
    store: PrefixStore, meeting: Rendezvous, roll: Roll, askers: Sequence[int], timeout_s: float, max_skew_s: float
) -> float:
    """The largest skew, on all ranks. Raises ValueError naming the hosts whose clocks are off."""
    found: dict[int, tuple[float, float]] = {}
    if meeting.rank == 0:
        found = serve_clock(store, askers, timeout_s)
    elif meeting.rank in askers:
        ask_clock(store, meeting.rank, timeout_s)

    def judge(_: Sequence[Record]) -> float:
        off = [(rank, ahead) for rank, (ahead, sure) in found.items() if abs(ahead) - sure > max_skew_s]
        if off:
            said = [
                f"{roll.hosts[rank]} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {roll.hosts[0]}"
                for rank, ahead in off[:_SHOWN]
            ]
            raise ValueError(
                f"the clock of {'; the clock of '.join(said)}; at most {max_skew_s:g} s are allowed (--max-clock-skew). "
                "Set the clocks by NTP, or logs, timeouts and traces of these hosts do not fit together"
            )
        return max((abs(ahead) for ahead, _ in found.values()), default=0.0)

    return float(call_roll(PrefixStore("verdict", store), meeting.rank, meeting.world_size, {}, judge, timeout_s))


def decline_attempts(meeting: Rendezvous, prefixes: Sequence[str]) -> None:
    """Tell ranks that wait in an earlier attempt of this job that it has been started anew.

    torchrun's agents count restarts each for itself: that of a node which came later, or whose ranks were not ready when those of
    another one failed, is behind. Its ranks would wait for us at their own count until the deadline.
    """
    said = f"torchrun has restarted this node's ranks {meeting.attempt} time(s), those of others fewer times; they have to start again too"
    for prefix in prefixes:
        _leave_word(meeting, prefix, said)


def decline(prefix: str, error: Exception) -> None:
    """Leave word for ranks that are, or will be, in ``muster`` that this one does not come. Never raises."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    with suppress(ValueError, RuntimeError, OSError):
        _leave_word(Rendezvous.from_env(_DECLINE_S), prefix, str(error))


def _leave_word(meeting: Rendezvous, prefix: str, said: str) -> None:
    """What the ranks in ``muster`` under ``prefix`` find in place of this one's record."""
    host = host_label(meeting.host, meeting.port)
    store = PrefixStore(f"{prefix}/muster/roll", meeting.store)
    refuse(store, meeting.rank, {"host": host, "declined": said}, f"rank {meeting.rank} on {host}: {said}")
