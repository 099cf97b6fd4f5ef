"""The doctor's section on host memory."""

from rorqual.attention.kv.host.probe import RegionClass
from rorqual.launch import doctor_memory
from rorqual.launch.doctor_memory import host_memory
from tests.attention.kv.host.test_topology import machine  # noqa: F401 - a fixture


def rows(root, **options):
    return {row["item"]: row for row in host_memory(root, **options)}


def test_this_machine():
    found = rows(doctor_memory._ROOT)
    assert found["available memory"]["bytes"] > 0 and "huge pages" in found and "locked memory" in found
    assert any(name.startswith("NUMA node") and "GB/s" in row["note"] for name, row in found.items())


def test_a_machine_with_cxl(machine):  # noqa: F811
    found = rows(machine, probing=False)
    assert found["NUMA node 10"]["note"].startswith("cxl:node10, no CPUs") and found["NUMA node 0"]["note"] == "5 CPUs"
    assert found["dax0.0"]["note"] == "memory of NUMA node 10" and found["dax10.0"]["note"] == "cxl:/dev/dax10.0"
    assert found["mem0"]["value"] == "128.0 GiB" and "CXL" not in found
    assert found["available memory"]["value"] == "160.0 GiB"


def test_classes_are_relative_to_ordinary_memory(machine, monkeypatch):  # noqa: F811
    def probe(node):
        return RegionClass(latency_ns={0: 100, 1: 120, 10: 240}[node.index], gb_per_s=20)

    monkeypatch.setattr(doctor_memory, "_probe_node", probe)
    found = rows(machine)
    assert found["NUMA node 0"]["note"] == "5 CPUs; near: 100 ns, 20.0 GB/s"
    assert found["NUMA node 10"]["note"] == "cxl:node10, no CPUs (CXL or other added memory); far: 240 ns, 20.0 GB/s"
    assert found["dax10.0"]["note"].startswith("cxl:/dev/dax10.0; /dev/dax10.0: the CXL region cannot be opened")


def test_settings_that_are_not_there(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    found = rows(tmp_path)
    assert found["CXL"]["value"] == "none" and found["huge pages"]["value"] == "not known"
