"""The probe gives plausible numbers, in bounded time, and changes nothing."""

import time

import pytest

from rorqual.attention.kv.host.pinned import anonymous
from rorqual.attention.kv.host.probe import RegionClass, gb_per_s, probe


def test_probe_of_ordinary_memory():
    region = anonymous(64 << 20, (), 2)
    region.tensor.fill_(0x5A)
    start = time.perf_counter()
    found = probe(region, 0.1)
    assert time.perf_counter() - start < 2
    assert 0 <= found.latency_ns < 5000 and 0.1 < found.gb_per_s < 2000
    assert (region.tensor == 0x5A).all()
    region.close()


def test_threads_that_begin_late_copy_all_the_same():
    region = anonymous(8 << 20, (), 2)
    assert gb_per_s(region, 0.0) > 0.0, "no time is left when they begin"
    region.close()


@pytest.mark.parametrize(("latency", "name"), [(100, "near"), (130, "near"), (160, "far"), (750, "slow")])
def test_classes(latency, name):
    found = RegionClass(latency_ns=latency, gb_per_s=25)
    assert found.name(100) == name and found.describe(100) == f"{name}: {latency} ns, 25.0 GB/s"
