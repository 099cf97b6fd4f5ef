"""What nodes of one job may differ in: numbers of ranks, how the meeting's name resolves, restarts, and who fails before all have met."""

from __future__ import annotations

import os
import time

import pytest
import torch

from rorqual.launch import cli, errors
from rorqual.parallel import join, muster
from rorqual.parallel.failure import collective_error
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import CollectiveError
from rorqual.parallel.interface import address_elsewhere
from rorqual.parallel.store import Rendezvous
from tests.ranks import collect_ranks, run_ranks

CPU = torch.device("cpu")


def places(sizes: list[int]) -> tuple[tuple[int, ...], range]:
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[int(os.environ["RANK"])])
    grid = Grid.create(GridSpec(dp=len(sizes)), CPU, 20.0)
    found = grid.node_of, grid.node_ranks
    grid.close()
    return found


@pytest.mark.parametrize(
    ("sizes", "nodes", "ranks"),
    [
        ([1, 2, 2], (0, 1, 1), [range(1), range(1, 3), range(1, 3)]),
        ([2, 2, 1], (0, 0, 1), [range(2), range(2), range(2, 3)]),
        ([2, 2, 2, 2], (0, 0, 1, 1), [range(2), range(2), range(2, 4), range(2, 4)]),
    ],
)
def test_all_ranks_know_the_same_nodes_whatever_their_sizes(sizes: list[int], nodes: tuple[int, ...], ranks: list[range]) -> None:
    assert run_ranks(places, len(sizes), sizes) == [(nodes, here) for here in ranks]


def meeting_host() -> tuple[str | None, str]:
    if os.environ["RANK"] == "1":
        muster.address_elsewhere = lambda host, port: "192.0.2.7"  # as the name resolves on another host
    roll = muster.muster(Rendezvous.from_env(20.0), "t", {}, 20.0, float("inf"))
    return roll.address, roll.meeting_host("127.0.0.1", 9)


def test_a_host_that_takes_the_meeting_for_loopback_learns_its_address_from_the_others() -> None:
    assert address_elsewhere("192.0.2.9", 9) == "192.0.2.9"
    assert address_elsewhere("127.0.1.1", 9) is None and address_elsewhere("no-such-name.invalid", 9) is None
    (address, on_loopback), (_, other) = run_ranks(meeting_host, 2)
    assert (address, on_loopback) == ("192.0.2.7", "192.0.2.7")
    assert other == "127.0.0.1", "a host on which the name is no loopback goes by what it knows itself"


def restarted(counts: list[int]) -> tuple[str, float]:
    count = counts[int(os.environ["RANK"])]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count)
    begin = time.monotonic()
    try:
        Grid.create(GridSpec(dp=2), CPU, 4.0 if count > min(counts) else 60.0).close()
    except (ValueError, CollectiveError) as error:
        return str(error), time.monotonic() - begin
    return "met", 0.0


@pytest.mark.parametrize("behind", [0, 1])
def test_ranks_of_an_agent_with_fewer_restarts_end_at_once(behind: int) -> None:
    found = run_ranks(restarted, 2, [0, 2] if behind == 0 else [2, 0])
    text, seconds = found[behind]
    assert f"rank {1 - behind} on " in text and "restarted this node's ranks 2 time(s)" in text and seconds < 30, found
    assert run_ranks(restarted, 2, [2, 2]) == [("met", 0.0)] * 2


def missing_package(*_: object) -> None:
    raise ModuleNotFoundError("No module named 'jinja2'")


def wrong_command(bad: int, crash: bool) -> tuple[str, float]:
    begin = time.monotonic()
    if int(os.environ["RANK"]) == bad:
        errors.PATIENCE_S = 0.0
        if crash:
            cli.parse = missing_package
        try:
            return str(cli.main(["generate", "tiny", "--prompts-file", "/no/such/prompts.jsonl"])), 0.0
        except ModuleNotFoundError as error:
            return str(error), 0.0
    try:
        Grid.create(GridSpec(dp=2), CPU, 60.0).close()
    except ValueError as error:
        return str(error), time.monotonic() - begin
    return "met", 0.0


@pytest.mark.parametrize(
    ("bad", "crash", "ends", "told"),
    [
        (0, False, "2", "/no/such/prompts.jsonl"),
        (1, False, "2", "/no/such/prompts.jsonl"),
        (1, True, "No module named 'jinja2'", "ModuleNotFoundError: No module named 'jinja2'"),
    ],
)
def test_a_command_that_ends_before_the_ranks_meet_tells_the_others(bad: int, crash: bool, ends: str, told: str) -> None:
    found = run_ranks(wrong_command, 2, bad, crash)
    text, seconds = found[1 - bad]
    assert found[bad][0] == ends and text.startswith(f"rank {bad} on ") and told in text and seconds < 30, found


def unreachable() -> None:
    """Rank 1 cannot connect; rank 0 waits for it."""
    if os.environ["RANK"] == "1":

        def refuse(meeting, prefix, spec, device, timeout_s, progress):  # type: ignore[no-untyped-def]
            raise collective_error(
                "Connection refused", op="create", group="world", ranks=range(2), peers=[0], deadline_s=timeout_s, progress=progress
            )

        join._connect = refuse
    Grid.create(GridSpec(dp=2), CPU, 90.0)


def test_a_rank_that_cannot_connect_ends_the_others() -> None:
    exits = collect_ranks(unreachable, 2, timeout=60.0)
    assert [e.code for e in exits] == [1, 1], exits
    assert "stopping because rank 1 failed first" in exits[0].stderr and "Connection refused" in exits[0].stderr
    assert max(e.seconds for e in exits) < 45
