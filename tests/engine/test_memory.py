"""Host memory that ranks may use: what the machine has, or what is left of their control group's limit."""

from __future__ import annotations

import pytest
import torch

from rorqual.attention.kv.host import room
from rorqual.engine import memory
from rorqual.engine.config import EngineConfig


@pytest.fixture
def limited(monkeypatch):
    """A control group with 1 GiB left."""
    monkeypatch.setattr(room, "_group_rest", lambda root: [1 << 30])


def test_host_memory_is_that_of_the_control_group(limited):
    assert memory.host_available() == room.available_bytes() == 1 << 30


def test_weights_and_the_cache_on_cpus_heed_the_limit(limited):
    cpu = torch.device("cpu")
    memory.check_weights(500 << 20, cpu, 2)
    with pytest.raises(ValueError, match="0.5 GB are free in host memory for each of 2 ranks"):
        memory.check_weights(600 << 20, cpu, 2)
    with pytest.raises(ValueError, match="take 0.3 GB and buffers of moving experts 0.3 GB, .*; lower staging_experts"):
        memory.check_weights(300 << 20, cpu, 2, staging=300 << 20)
    assert memory.free_bytes(cpu, EngineConfig(model="tiny"), 2) == int((1 << 30) * memory.CPU_SHARE) // 2


@pytest.mark.parametrize("error", [OSError("no /proc"), ValueError("no line MemAvailable")])
def test_systems_without_meminfo_are_asked_for_free_pages(error, monkeypatch):
    def missing(root):
        raise error

    monkeypatch.setattr(room, "_mem_available", missing)
    assert memory.host_available() > 1 << 20
