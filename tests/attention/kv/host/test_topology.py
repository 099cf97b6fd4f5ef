"""What is read from sysfs, on trees made here; and whether a pool fits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rorqual.attention.kv.host.room import available_bytes, check_folder, check_memory, default_bytes
from rorqual.attention.kv.host.topology import gpu_node, parse_list, pci_node, read_topology

GIB = 1 << 30


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def node(root: Path, index: int, cpus: str, total: int, free: int, distance: str) -> None:
    base = f"sys/devices/system/node/node{index}"
    put(root, f"{base}/cpulist", cpus + "\n")
    lines = {"MemTotal": total, "MemFree": free, "Active(file)": GIB // 2, "Inactive(file)": GIB // 2}
    put(root, f"{base}/meminfo", "".join(f"Node {index} {name}: {value // 1024} kB\n" for name, value in lines.items()))
    put(root, f"{base}/distance", distance + "\n")


@pytest.fixture
def machine(tmp_path):
    """Two sockets, one CXL node, one DAX device to map and one that is the node's memory."""
    node(tmp_path, 0, "0-3,8", 64 * GIB, 40 * GIB, "10 21 24")
    node(tmp_path, 1, "4-7", 64 * GIB, 2 * GIB, "21 10 34")
    node(tmp_path, 10, "", 128 * GIB, 127 * GIB, "24 34 10")
    put(tmp_path, "sys/devices/system/node/possible", "0-10\n")
    for name, size, target in (("dax0.0", 128 * GIB, 10), ("dax10.0", 256 * GIB, -1)):
        put(tmp_path, f"sys/bus/dax/devices/{name}/size", f"{size}\n")
        put(tmp_path, f"sys/bus/dax/devices/{name}/align", f"{2 << 20}\n")
        put(tmp_path, f"sys/bus/dax/devices/{name}/target_node", f"{target}\n")
    for name, driver in (("dax0.0", "kmem"), ("dax10.0", "device_dax")):
        (tmp_path / "sys/bus/dax/drivers" / driver).mkdir(parents=True)
        (tmp_path / f"sys/bus/dax/devices/{name}/driver").symlink_to(tmp_path / "sys/bus/dax/drivers" / driver)
    put(tmp_path, "sys/bus/cxl/devices/mem0/ram/size", "0x2000000000\n")
    put(tmp_path, "sys/bus/cxl/devices/mem0/pmem/size", "0x0\n")
    put(tmp_path, "sys/bus/cxl/devices/mem0/numa_node", "1\n")
    put(tmp_path, "sys/bus/cxl/devices/decoder0.0/size", "0x0\n")
    put(tmp_path, "sys/bus/pci/devices/0000:1a:00.0/numa_node", "1\n")
    put(tmp_path, "sys/bus/pci/devices/0000:1b:00.0/numa_node", "-1\n")
    put(tmp_path, "proc/meminfo", f"MemTotal: {256 * GIB // 1024} kB\nMemAvailable: {160 * GIB // 1024} kB\n")
    return tmp_path


def test_nodes_devices_and_cxl(machine):
    found = read_topology(machine)
    assert [(n.index, n.cpus, n.memory_only) for n in found.nodes] == [
        (0, (0, 1, 2, 3, 8), False),
        (1, (4, 5, 6, 7), False),
        (10, (), True),
    ]
    assert found.nodes[2].available_bytes == 128 * GIB and found.nodes[0].distances == (10, 21, 24)
    assert found.memory_only_nodes == (found.nodes[2],)
    assert [(d.name, d.n_bytes, d.node, d.driver) for d in found.dax] == [
        ("dax0.0", 128 * GIB, 10, "kmem"),
        ("dax10.0", 256 * GIB, None, "device_dax"),
    ]
    assert [(c.name, c.volatile_bytes, c.node) for c in found.cxl] == [("mem0", 128 * GIB, 1)]


def test_a_bare_machine_has_nothing(tmp_path):
    found = read_topology(tmp_path)
    assert found.nodes == found.dax == found.cxl == ()


def test_node_of_a_pci_device(machine):
    assert pci_node("0000:1A:00.0", machine) == 1
    assert pci_node("0000:1b:00.0", machine) is None and pci_node("0000:ff:00.0", machine) is None
    assert gpu_node(torch.device("cpu"), machine) is None


def test_lists():
    assert parse_list("0-2,7\n") == (0, 1, 2, 7) and parse_list("") == ()


def test_this_machine_is_readable():
    assert all(n.total_bytes >= n.available_bytes >= 0 for n in read_topology().nodes)
    assert available_bytes() > 1 << 20


def test_the_control_group_limits_what_is_available(machine):
    assert available_bytes(machine) == 160 * GIB
    put(machine, "proc/self/cgroup", "0::/pods/this\n")
    group = "sys/fs/cgroup/pods"
    put(machine, f"{group}/this/memory.max", "max\n")
    for name, value in (("max", 50 * GIB), ("current", 20 * GIB), ("stat", f"anon 5\ninactive_file {GIB}")):
        put(machine, f"{group}/memory.{name}", f"{value}\n")
    assert available_bytes(machine) == 31 * GIB
    put(machine, "proc/self/cgroup", "4:memory:/\n3:cpu:/x\n")
    for name, value in (("limit_in_bytes", 9 * GIB), ("usage_in_bytes", GIB), ("stat", "cache 5")):
        put(machine, f"sys/fs/cgroup/memory/memory.{name}", f"{value}\n")
    assert available_bytes(machine) == 8 * GIB


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (153 * GIB, {}, "host pool of 153.00 GiB does not fit: 152.00 GiB is available"),
        (80 * GIB, {"ranks_here": 2}, "for each of 2 ranks"),
        (20 * GIB, {"stated": 10 * GIB}, "10.00 GiB was stated"),
        (10 * GIB, {"nodes": (1,)}, "NUMA node 1, which has 3.00 GiB available"),
        (10 * GIB, {"nodes": (0, 4)}, r"no NUMA node 4 here; the nodes are \[0, 1, 10\]"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(machine, size, changes, message):
    with pytest.raises(ValueError, match=message):
        check_memory(size, root=machine, **changes)


def test_a_pool_that_fits(machine):
    check_memory(140 * GIB, root=machine)
    check_memory(60 * GIB, nodes=(0, 10), root=machine)
    check_memory(500 * GIB, stated=501 * GIB, nodes=(0,), root=machine)


@pytest.fixture
def two_sockets(tmp_path):
    """110 GiB in each, of which 100 are available."""
    for index, distance in enumerate(("10 20", "20 10")):
        node(tmp_path, index, f"{32 * index}-{32 * index + 31}", 110 * GIB, 99 * GIB, distance)
    put(tmp_path, "proc/meminfo", f"MemTotal: {220 * GIB // 1024} kB\nMemAvailable: {200 * GIB // 1024} kB\n")
    return tmp_path


@pytest.mark.parametrize(("ranks", "on_node", "each"), [(8, 4, 20), (1, 1, 80), (8, 8, 10), (2, 1, 80), (3, 2, 40)])
def test_what_ranks_take_by_default_fits_the_nodes_of_their_gpus(two_sockets, ranks, on_node, each):
    found = default_bytes(0.8, nodes=(0,), ranks_here=ranks, ranks_on_nodes=on_node, root=two_sockets)
    assert found == each * GIB
    check_memory(found, nodes=(0,), ranks_here=ranks, ranks_on_nodes=on_node, root=two_sockets)
    with pytest.raises(ValueError, match="would come from NUMA node 0, which has 100.00 GiB"):
        check_memory(96 * GIB // on_node, nodes=(0,), ranks_here=on_node, ranks_on_nodes=on_node, root=two_sockets)


def test_defaults_without_nodes(two_sockets):
    assert default_bytes(0.5, ranks_here=4, root=two_sockets) == 25 * GIB
    assert default_bytes(0.5, nodes=(0, 1), root=two_sockets) == 100 * GIB
    assert default_bytes(0.5, nodes=(7,), root=two_sockets) == 100 * GIB  # a node that is not there is refused by the check
    assert default_bytes(0.5, nodes=(0,), stated=10 * GIB, root=two_sockets) == 5 * GIB


def test_folders(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no such folder"):
        check_folder(tmp_path / "none", 1)
    with pytest.raises(ValueError, match=r"does not fit into .* free"):
        check_folder(tmp_path, 1 << 60)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="no permission"):
        check_folder(tmp_path, 1)
