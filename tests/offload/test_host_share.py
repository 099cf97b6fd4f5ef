"""How the ranks of a host divide its memory, and what they take of it when nobody says how much."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.memory import CPU_SHARE
from rorqual.engine.offload import pools
from rorqual.engine.offload.host_share import HostShare, host_bytes
from rorqual.parallel.grid import GridSpec
from rorqual.parallel.store import ranks_of_host


@dataclass
class Memory:
    """A backing with as many bytes as there are."""

    n_bytes: int

    def room(self, share: float) -> int:
        return round(share * self.n_bytes)


@pytest.mark.parametrize(
    ("spec", "ranks", "whole"),
    [
        (GridSpec(tp=2), 2, [True] * 2),
        (GridSpec(tp=2), 1, [False] * 2),
        (GridSpec(dp=2, tp=2), 2, [True] * 4),
        (GridSpec(dp=3, tp=2), 4, [True] * 6),
        (GridSpec(dp=2, tp=3), 2, [False] * 6),
        (GridSpec(dp=3, tp=2), 3, [True, True, False, False, True, True]),
        (GridSpec(pp=2, tp=2), 4, [True] * 4),
        (GridSpec(pp=2, tp=2), 2, [False] * 4),
    ],
)
def test_replicas_that_lie_on_one_host(spec, ranks, whole):
    shares = [HostShare.at(spec, rank, ranks, 5) for rank in range(spec.world)]
    assert [share.whole for share in shares] == whole
    for rank, share in enumerate(shares):
        here = shares[share.first : share.first + share.ranks]
        assert share is here[share.member] and {other.part for other in here} == set(range(share.parts))
        assert all((other.first, other.ranks, other.layers) == (share.first, share.ranks, share.layers) for other in here)
        assert rank == share.first + share.member


def test_layers_of_the_stages_on_a_host():
    spec = GridSpec(pp=4, dp=2)
    assert [HostShare.at(spec, rank, 4, 9).layers for rank in (0, 3, 4, 7)] == [range(4)] * 2 + [range(4, 9)] * 2
    assert HostShare.at(spec, 5, 8, 9).layers == range(9) and HostShare.at(spec, 7, 2, 9).layers == range(6, 9)


def test_hosts_of_different_sizes():
    spec = GridSpec(dp=3)  # ranks 0 on one host, 1 and 2 on another
    shares = [HostShare.among(spec, rank, here, 5) for rank, here in ((0, range(1)), (1, range(1, 3)), (2, range(1, 3)))]
    assert [(share.first, share.ranks, share.member, share.parts, share.part) for share in shares] == [
        (0, 1, 0, 1, 0), (1, 2, 0, 2, 0), (1, 2, 1, 2, 1),
    ]  # fmt: skip


def test_ranks_of_a_host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_of_host(8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_of_host(8) == 4


def test_bytes_that_were_not_asked_for():
    share, memory = HostShare.at(GridSpec(dp=4), 1, 4, 5), Memory(1000)
    assert host_bytes(EngineConfig(), share, memory, on_cpu=False) == 800
    assert host_bytes(EngineConfig(), share, memory, on_cpu=True) == 650
    assert 650 + CPU_SHARE * 1000 <= 900
    for backing, parts in (("pinned", 4), ("cxl", 4), ("shm", 1), ("file", 1)):
        assert host_bytes(EngineConfig(kv_host_memory=2.0, kv_host_backing=backing), share, memory, on_cpu=False) == (2 << 30) // parts


def test_nodes_that_share_a_folder_have_pools_of_their_own():
    """Two agents on one machine, or containers with one /dev/shm: a pool's name is that of its node's ranks."""
    spec = GridSpec(dp=3)
    numbers = {"world": SimpleNamespace(gather_ints=lambda mine: np.array([[7], [8], [9]])), "device": torch.device("cpu")}
    nodes = [range(1), range(1, 3), range(1, 3)]
    places = [pools._place(SimpleNamespace(**numbers), HostShare.among(spec, rank, here, 5)) for rank, here in enumerate(nodes)]
    assert places[0].job != places[1].job == places[2].job
    assert [(place.member, place.members) for place in places] == [(0, 1), (0, 2), (1, 2)]
