"""Which backend a grid gets, what is said of the others, and specs that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm import select
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.local import LocalDispatcher
from rorqual.comm.select import choose, explain, make_dispatcher
from rorqual.comm.torch_node import TorchNodeDispatcher, rails
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from rorqual.parallel.progress import Progress
from tests.ranks import run_ranks

SPEC = EPSpec(n_ranks=1, n_slots=8, hidden=16, top_k=2, max_tokens=4)


def pretend(node_of: tuple[int, ...]) -> Grid:
    """Rank 0 of a grid of several ranks that is not connected to any."""
    grid = Grid.single(torch.device("cpu"))
    grid.ep = Group("ep", range(len(node_of)), 0, process_group=None, deadline_s=1.0, progress=Progress(rank=0))
    grid.node_of = node_of
    return grid


def test_one_rank_is_local_whatever_was_asked() -> None:
    grid = Grid.single(torch.device("cpu"))
    for backend in ("auto", "local", "torch", "torch_node", "torch_static"):
        assert isinstance(make_dispatcher(backend, grid, SPEC), LocalDispatcher)
    rows = {name: (usable, reason) for name, usable, reason in explain(grid)}
    assert rows["local"] == (True, "all experts on one rank")
    assert "nothing to send, local is used" in rows["torch"][1] and "nothing to send" in rows["torch_node"][1]


def test_auto_looks_at_nodes() -> None:
    assert choose("auto", pretend((0, 0, 0, 0))) == "torch"
    assert choose("auto", pretend((0, 0, 1, 1))) == "torch_node"
    assert choose("auto", pretend((0, 0, 1))) == "torch"
    assert choose("torch_static", pretend((0, 1))) == "torch_static"
    rows = {name: (usable, reason) for name, usable, reason in explain(pretend((0, 0, 1)))}
    assert rows["torch_node"] == (False, "node-limited dispatch needs the same number of ranks on every node, found [2, 1]")
    assert rows["local"] == (False, "experts are spread over 3 ranks") and rows["torch"] == (True, "3 expert ranks")
    rows = {name: (usable, reason) for name, usable, reason in explain(pretend((0, 1, 0, 1)))}
    assert rows["torch_node"] == (True, "2 nodes of 2 ranks")


def test_what_cannot_be() -> None:
    known = "auto, local, torch, torch_node, torch_static, symm, nvshmem, nvshmem_node, deep_ep, deep_ep_ll, shm"
    with pytest.raises(ValueError, match=f"unknown all-to-all backend 'smoke'; known: {known}"):
        make_dispatcher("smoke", Grid.single(torch.device("cpu")), SPEC)
    with pytest.raises(ValueError, match="'torch_node' cannot be used here: node-limited dispatch needs the same number"):
        choose("torch_node", pretend((0, 0, 1)))
    with pytest.raises(ValueError, match="'local' cannot be used here: experts are spread over 2 ranks"):
        choose("local", pretend((0, 0)))
    with pytest.raises(ValueError, match="the node map has 2 entries, the expert group 1 ranks"):
        TorchNodeDispatcher(Group.solo(), SPEC, (0, 1))
    assert rails((1, 0, 1, 0)) == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_ranks": 2}, "EPSpec.n_ranks is 2, but the expert group has 1 ranks"),
        ({"hidden": 0}, "EPSpec.hidden must be at least 1, found 0"),
        ({"top_k": 0}, "EPSpec.top_k must be at least 1, found 0"),
        ({"max_tokens": 0}, "EPSpec.max_tokens must be at least 1, found 0"),
        ({"payload": "int4"}, "EPSpec.payload must be one of native, bf16, fp8, fp8_ue8m0, bytes, found 'int4'"),
        ({"dtype": "int8"}, "EPSpec.dtype must be one of float32, bfloat16, float16, found 'int8'"),
    ],
)
def test_specs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalDispatcher(replace(SPEC, **changes))


def test_slots_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"8 expert slots do not divide over 3 ranks; valid numbers of ranks: \[1, 2, 4, 8\]"):
        make_dispatcher("torch", pretend((0, 0, 0)), replace(SPEC, n_ranks=3))


def made(ranks_per_node: int) -> list[str]:
    grid = Grid.create(GridSpec(dp=4, ranks_per_node=ranks_per_node), torch.device("cpu"), 30.0)
    spec = replace(SPEC, n_ranks=4)
    names = [type(make_dispatcher(backend, grid, spec)).__name__ for backend in ("auto", "torch", "torch_static")]
    names.append(type(make_dispatcher("local", grid, SPEC)).__name__)  # experts not spread
    grid.close()
    return names


def test_backends_of_real_grids() -> None:
    assert run_ranks(made, 4, 2)[3] == ["TorchNodeDispatcher", "TorchDispatcher", "TorchStaticDispatcher", "LocalDispatcher"]


def test_auto_takes_torch_where_memory_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("the ranks' GPUs differ, but their numbers are [0, 0]")

    monkeypatch.setattr(select, "check_places", refuse)
    with caplog.at_level("WARNING"):
        assert (
            select._where_mapped("symm", pretend((0, 0))) == "torch" and select._where_mapped("torch_node", pretend((0, 1))) == "torch_node"
        )
    assert "their numbers are [0, 0]; auto takes torch" in caplog.text
