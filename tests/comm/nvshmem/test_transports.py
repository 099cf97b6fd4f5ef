"""The preflight on made-up hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.comm.nvshmem import preflight, preflight_node, transports
from rorqual.comm.nvshmem.library import find
from rorqual.comm.nvshmem.transports import mps, network
from rorqual.launch.doctor_experts import planned
from rorqual.launch.doctor_transports import transports as rows
from tests.comm.nvshmem.test_library import install


def test_what_loads_and_why_not(tmp_path: Path) -> None:
    root = install(tmp_path / "a")
    (root / "lib/nvshmem_transport_ibrc.so.3").write_bytes(b"not a library")
    good = next(Path("/usr/lib").rglob("libc.so.6"), None) or next(Path("/lib").rglob("libc.so.6"))
    os.symlink(good, root / "lib/nvshmem_transport_ucx.so.3")
    bad, fine = transports.transports(find([root]))
    assert (bad.item, bad.good) == ("transport ibrc", False) and "nvshmem_transport_ibrc.so.3" in bad.note
    assert (fine.item, fine.good, fine.note) == ("transport ucx", True, "UCX")


def test_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(f.item, f.good) for f in network(tmp_path)] == [("RDMA devices", False)]
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    devices, access, memory = network(tmp_path)
    assert devices.good and devices.note == "mlx5_0" and not access.good and "not in this container" in access.note and not memory.good
    verbs = tmp_path / "dev/infiniband/uverbs0"
    verbs.parent.mkdir(parents=True)
    verbs.write_text("")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/modules").write_text("nvidia_peermem 16384 0 - Live\nxfs 1 0 - Live\n")
    _, access, memory = network(tmp_path)
    assert access.good and memory.good and memory.note == "nvidia_peermem loaded"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert network(tmp_path)[1].note == "no permission for uverbs0: read and write are needed"


def test_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    assert not mps(tmp_path).good and "no server at /run/mps" in mps(tmp_path).note
    (tmp_path / "run/mps").mkdir(parents=True)
    (tmp_path / "run/mps/control").write_text("")
    assert mps(tmp_path).good and "no share set" in mps(tmp_path).note
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    assert "50% of the GPU's threads a process" in mps(tmp_path).note


def test_doctor_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(install(tmp_path / "a")))
    monkeypatch.setenv("NVSHMEM_DEBUG", "INFO")
    found: dict[str, Any] = {row["item"]: row for row in rows()}
    assert found["NVSHMEM"]["value"] in ("3.4.5", "no") and found["NVSHMEM_DEBUG"]["value"] == "INFO"
    assert "RDMA devices" in found and "MPS" in found and found["deep_ep"]["note"].startswith("library of backends")


def test_explain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(install(tmp_path / "a")))
    cpu, cuda = planned(torch.device("cpu"), (0, 0)), planned(torch.device("cuda", 0), (0, 0))
    assert preflight.explain(cpu) == (False, "it needs CUDA devices, and tokens are on the cpu")
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert preflight.explain(cuda) == (False, "its kernels need the package triton")
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())
    monkeypatch.setattr(preflight, "bindings_version", lambda: "0.4.1")
    assert preflight.explain(cuda) == (True, "NVSHMEM 3.4.5, nvshmem4py 0.4.1: stores where ranks are mapped, puts where not")
    assert preflight.explain(planned(torch.device("cuda", 0), (0,)))[1].endswith("local is used in its place")

    two = preflight_node.explain(planned(torch.device("cuda", 0), (0, 0, 1, 1)))
    assert two[0] and two[1].endswith("a token crosses to a node once (2 nodes of 2 ranks); no CUDA graphs")
    assert preflight_node.explain(cuda)[1].endswith("one node: a token takes one hop more than with nvshmem")
    assert preflight_node.explain(planned(torch.device("cuda", 0), (0, 0, 1))) == (
        False, "two hops need the same number of ranks on every node, found [2, 1]"
    )  # fmt: skip
    assert "neighbouring ranks" in preflight_node.explain(planned(torch.device("cuda", 0), (0, 1, 0, 1)))[1]

    def absent() -> str:
        raise ValueError("nvshmem4py is missing")

    monkeypatch.setattr(preflight, "bindings_version", absent)
    assert preflight.explain(cuda) == (False, "nvshmem4py is missing")
