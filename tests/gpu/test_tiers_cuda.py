"""Attention over rows in three places on CUDA: bit-equal to all rows on the device, launched one by one and in graphs."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from rorqual.attention.batch import AttentionBatch
from rorqual.attention.config import IndexerConfig, MLAConfig, RopeConfig
from rorqual.attention.kv.tier import TierCounter
from rorqual.attention.ops import AttentionOps
from tests.attention.tiered import Resident, Setting, Tiered, plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

#: the widths that Hopper's kernels are made for, and few heads
WIDE = MLAConfig(
    hidden=256, n_heads=16, q_lora_rank=128, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, rope=RopeConfig(dim=64),
    indexer=IndexerConfig(n_heads=64, head_dim=128, topk=128, layer_types=("full", "shared")),
)  # fmt: skip
HALF = {"compute": torch.bfloat16}
WIDE_STEPS = {"config": WIDE, "n_layers": 2, "page_size": 64, "lengths": (700, 420, 300), "chunk": 300}
KINDS = [
    {},
    {"dtype": "bfloat16", **HALF},
    {"dtype": "bfloat16", **HALF, **WIDE_STEPS},
    {"dtype": "fp8", **HALF, **WIDE_STEPS},
]


class Side:
    """Forks on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    @contextmanager
    def fork(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


def setting(kind, **more) -> Setting:
    return Setting(device="cuda", ops="triton", fused=True, **(kind | more))


def compare(one: Resident, many: Tiered, steps) -> None:
    for rows, counts in steps:
        expected, got = one.step(rows, counts), many.step(rows, counts)
        assert bool(got.isfinite().all()), (rows, counts)
        assert torch.equal(got, expected), (rows, counts, many.done.tolist(), float((got - expected).abs().max()))
        many.shake()
    assert many.counted(TierCounter.UNWRITTEN) == 0 and many.counted(TierCounter.MISSES) > 0


def decodes(s: Setting, n: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, then ``n`` steps of one token for every request."""
    rows = list(range(len(s.lengths)))
    return [(rows, [length - n for length in s.lengths])] + [(rows, [1] * len(rows))] * n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_random_steps(kind, static):
    s = setting(kind, static=static, seed=len(kind))
    compare(Resident(s), Tiered(s), plan(s)[:25])


class Graphed(Tiered):
    """Static steps replayed from one graph for each family, resident and offloaded."""

    def __init__(self, s: Setting) -> None:
        super().__init__(s)
        n = len(s.lengths) + 1
        self.inputs = {
            "x": torch.zeros(n, s.config.hidden, dtype=s.compute, device="cuda"),
            "positions": torch.zeros(n, dtype=torch.int64, device="cuda"),
            "slots": torch.zeros(n, dtype=torch.int64, device="cuda"),
            "table": self.table.clone(),
            "valid": torch.tensor([n - 1], dtype=torch.int32, device="cuda"),
        }
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def body(self, offloaded: bool) -> torch.Tensor:
        i, size = self.inputs, self.cache.page_size
        tier = self.tables.step(i["table"], i["slots"], page_size=size, positions=i["positions"], offloaded=offloaded)
        rows, bound = torch.arange(len(i["x"]), device="cuda"), self.table.shape[1] * size
        batch = AttentionBatch.static(i["positions"], rows, i["table"], size, max_context=bound, n_valid=i["valid"], tier=tier)
        return self.forward(i["x"], batch)

    def run(self, x, rows, counts, tier, static):
        if not static:
            return super().run(x, rows, counts, tier, static)
        assert rows == list(range(len(self.x)))
        positions = torch.tensor([*self.done[rows].tolist(), 0])
        for name, value in (("x", x), ("positions", positions), ("slots", tier.slots)):
            self.inputs[name].copy_(value)
        if tier.offloaded not in self.graphs:
            self.graphs[tier.offloaded] = self.capture(tier.offloaded)
        graph, out = self.graphs[tier.offloaded]
        graph.replay()
        return out.clone()

    def capture(self, offloaded: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Warm up and capture without a valid row, so that no hot buffer changes."""
        self.inputs["valid"].zero_()
        kept = [self.inputs["table"].clone(), self.inputs["positions"].clone()]
        self.inputs["table"].fill_(self.cache.dummy_page)
        self.inputs["positions"].zero_()
        self.body(offloaded)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.body(offloaded)
        for name, value in zip(("table", "positions"), kept, strict=True):
            self.inputs[name].copy_(value)
        self.inputs["valid"].fill_(len(self.x))
        return graph, out


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("overlap", ["", "beside", "aside"])
def test_graphs(kind, overlap, monkeypatch):
    if overlap:
        ops = dataclasses.replace(AttentionOps.load("triton"), **{overlap: Side()})
        monkeypatch.setattr(AttentionOps, "load", lambda name: ops)
        monkeypatch.setattr("rorqual.attention.keys._BESIDE_FROM", 1)
    lengths = {"lengths": (60, 33, 20)} if "lengths" not in kind else {}
    s = setting(kind | lengths, static=True, seed=7, scored=overlap == "beside")
    one, many = Tiered(s), Graphed(s)  # the same events happen to both
    for rows, counts in decodes(s, 12):
        expected, got = one.step(rows, counts), many.step(rows, counts)
        assert torch.equal(got, expected), (counts, many.done.tolist())
        one.shake()
        many.shake()
    assert torch.equal(one.cache.hot.counters, many.cache.hot.counters) and many.counted(TierCounter.MISSES) > 0
    resident = Resident(dataclasses.replace(s))
    tiered = Graphed(s)
    if overlap != "beside":  # there the products are cut differently
        compare(resident, tiered, decodes(s, 12))
