"""Which work of attention runs on queues of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.attention.beside import IN_ORDER
from rorqual.attention.ops import AttentionOps
from rorqual.engine.config import EngineConfig
from rorqual.engine.models import backends
from rorqual.parallel.grid import GridSpec


class Stream:
    """What the engine would make on CUDA."""

    def __init__(self, device: torch.device, **more: Any) -> None:
        self.more = more


@pytest.mark.parametrize(
    ("device", "spec", "settings", "aside", "beside"),
    [
        ("cpu", {}, {}, False, False),
        ("cuda", {}, {}, True, False),
        ("cuda", {"dp": 4}, {"enforce_eager": True}, True, False),  # an eager engine computes what graphs do
        ("cuda", {"tp": 2}, {}, False, False),
        ("cuda", {"pp": 2}, {}, False, False),
        ("cuda", {}, {"kv_offload": "host", "kv_overlap_fetch": True}, True, True),
        ("cuda", {"tp": 2}, {"kv_offload": "host", "kv_overlap_fetch": True}, False, True),
        ("cuda", {}, {"kv_overlap_fetch": True}, True, False),
    ],
)
def test_queues(device, spec, settings, aside, beside, monkeypatch):
    monkeypatch.setattr(backends, "SideStream", Stream)
    grid: Any = SimpleNamespace(device=torch.device(device), spec=GridSpec(**spec))
    ops = backends._overlapping(AttentionOps.load("torch"), EngineConfig(model="tiny", **settings), grid)
    assert (ops.aside is not IN_ORDER, ops.beside is not IN_ORDER) == (aside, beside)
    if aside:
        assert ops.aside.more == {"captured_only": True, "urgent": False} and ops.aside is not ops.beside
