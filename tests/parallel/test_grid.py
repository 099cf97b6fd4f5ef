"""The grid: degrees, groups, places, and what is said when they do not fit."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_world_and_validation_message() -> None:
    spec = GridSpec(pp=2, dp=2, tp=2)
    assert spec.world == 8
    spec.validate(8)
    with pytest.raises(ValueError, match=r"pp=2 x dp=2 x tp=2 makes 8 ranks, but the job has 4.*dp=1 tp=2, dp=2 tp=1"):
        spec.validate(4)
    with pytest.raises(ValueError, match=r"pp=2 does not divide 3"):
        spec.validate(3)


@pytest.mark.parametrize("bad", [{"pp": 0}, {"dp": -1}, {"tp": 1.5}])
def test_degrees_must_be_positive_whole_numbers(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be a whole number of at least 1, found"):
        GridSpec(**bad)


def test_ranks_per_node_must_be_positive() -> None:
    with pytest.raises(ValueError, match="ranks_per_node must be at least 1, found 0"):
        GridSpec(ranks_per_node=0)


def test_single_needs_no_distributed() -> None:
    grid = Grid.single(CPU)
    assert grid.is_leader and grid.is_first_stage and grid.is_last_stage
    assert (grid.prev_rank, grid.next_rank, grid.first_stage_peer, grid.last_stage_peer) == (None, None, 0, 0)
    assert [g.size for g in (grid.tp, grid.ep, grid.replica, grid.world)] == [1] * 4 and grid.leaders is not None
    assert grid.node_of == (0,)
    assert not torch.distributed.is_initialized()
    x = torch.ones(3, 2)
    assert grid.tp.all_reduce(x) is x and grid.tp.all_gather(x) is x
    assert grid.ep.all_to_all(x, [3], [3]) is x
    assert grid.world.gather_ints([4, 5]).tolist() == [[4, 5]]
    assert grid.world.broadcast_bytes(b"abc") == b"abc"
    grid.world.barrier("alone")
    grid.close()
    grid.close()


def test_create_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"makes 2 ranks, but the job has 1: start 2 \(torchrun --nproc-per-node 2"):
        Grid.create(GridSpec(tp=2), CPU, 10.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="missing: MASTER_ADDR, MASTER_PORT, RANK"):
        Grid.create(GridSpec(tp=2), CPU, 10.0)
    assert Grid.create.__self__ is Grid


def _places(specs: list[GridSpec]) -> list[dict[str, object]]:
    found = []
    for spec in specs:  # several grids one after the other in the same processes
        grid = Grid.create(spec, CPU, 20.0)
        total = grid.ep.all_reduce(torch.tensor([float(grid.rank)])).item()
        found.append(
            {
                "place": (grid.pp_rank, grid.dp_rank, grid.tp_rank),
                "tp": grid.tp.ranks,
                "ep": grid.ep.ranks,
                "replica": grid.replica.ranks,
                "leaders": grid.leaders.ranks if grid.leaders else None,
                "node_of": grid.node_of,
                "neighbours": (grid.prev_rank, grid.next_rank, grid.first_stage_peer, grid.last_stage_peer),
                "stage": (grid.is_leader, grid.is_first_stage, grid.is_last_stage),
                "indices": (grid.tp.index, grid.ep.index, grid.replica.index, grid.world.index),
                "total": total,
                "summary": grid.summary(),
            }
        )
        grid.close()
    return found


def test_places_and_groups_of_eight_ranks() -> None:
    cube = GridSpec(pp=2, dp=2, tp=2, ranks_per_node=2)
    flat = GridSpec(dp=8)
    results = run_ranks(_places, 8, [cube, flat])
    for rank, (in_cube, in_flat) in enumerate(results):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert in_cube["place"] == (pp, dp, tp)
        assert in_cube["tp"] == (rank - tp, rank - tp + 1)
        assert in_cube["ep"] == tuple(range(4 * pp, 4 * pp + 4))
        assert in_cube["replica"] == (2 * dp, 2 * dp + 1, 4 + 2 * dp, 5 + 2 * dp)
        assert in_cube["leaders"] == ((0, 2) if rank in (0, 2) else None)
        assert in_cube["node_of"] == (0, 0, 1, 1)
        assert in_cube["neighbours"] == (rank - 4 if pp else None, None if pp else rank + 4, rank % 4, rank % 4 + 4)
        assert in_cube["stage"] == (rank in (0, 2), pp == 0, pp == 1)
        assert in_cube["indices"] == (tp, rank % 4, 2 * pp + tp, rank)
        assert in_cube["total"] == (6.0 if pp == 0 else 22.0)
        assert in_flat["ep"] == tuple(range(8)) and in_flat["tp"] == (rank,) and in_flat["leaders"] == tuple(range(8))
        assert in_flat["total"] == 28.0
        assert "grid pp=2 x dp=2 x tp=2 = 8 ranks, 2 node(s) per stage, cpu" in str(in_cube["summary"])
        assert f"this is rank {rank}: stage {pp}, replica {dp}, tp {tp}, expert rank {rank % 4} of 4" in str(in_cube["summary"])
        assert "stage 0 replica 1: ranks [2, 3], rank 2 leads" in str(in_cube["summary"])


def _hosting_own_store() -> float:
    grid = Grid.create(GridSpec(tp=2), CPU, 20.0)
    total = grid.tp.all_reduce(torch.ones(1)).item()
    grid.close()
    return total


def test_rank_zero_hosts_the_store_without_an_agent() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
    port = store.port
    del store  # the port is free again, and nothing else picks it within this test's second
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    assert run_ranks(_hosting_own_store, 2, env=env) == [2.0, 2.0]
    assert "RANK" not in os.environ


def _closing() -> list[object]:
    grid = Grid.create(GridSpec(dp=2), CPU, 20.0)
    seen: list[object] = []
    grid.before_close.append(lambda: seen.append(grid.world.gather_ints([grid.rank])[:, 0].tolist()))
    grid.close()
    grid.close()
    return seen


def test_what_holds_on_to_groups_is_released_before_they_close() -> None:
    assert run_ranks(_closing, 2) == [[[0, 1]], [[0, 1]]]
    single, seen = Grid.single(CPU), []
    single.before_close.append(lambda: seen.append(1))
    single.close()
    single.close()
    assert seen == [1]


def test_closing_goes_on_when_something_cannot_let_go() -> None:
    grid, told = Grid.single(torch.device("cpu")), []
    group = Group("tp", (0, 1), 0, process_group=object(), deadline_s=1.0, progress=grid.progress)  # type: ignore[arg-type]
    grid.tp = group

    def fails() -> None:
        raise RuntimeError("the device is gone")

    grid.before_close += [lambda: told.append("first"), fails, lambda: told.append("last")]
    with pytest.raises(RuntimeError, match="the device is gone"):
        grid.close()
    assert told == ["last", "first"] and group.process_group is None
