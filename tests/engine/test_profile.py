"""A trace of steps as times by part, on events written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rorqual.engine.ranges import ranges
from rorqual.engine.trace import STEP, Attribution, analyse, part_of, works
from rorqual.parallel.linear import Stacked


@dataclass(frozen=True)
class Ops:
    """Two operations, as ``AttentionOps`` has them."""

    select_rows: Any
    rms_norm: Any


def note(name, ts, dur):
    return {"cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "args": {}}


def call(number, ts, name="cudaLaunchKernel"):
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": 3, "args": {"correlation": number}}


def kernel(number, name, ts, dur, cat="kernel"):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": number, "stream": 7}}


def test_graph_steps_with_overlap():
    """Three steps of 100 us, launched one ahead: a copy, then a graph of three kernels with short gaps."""
    events = []
    for i in range(3):
        host, device = 100 * i, 100 * i + 150
        events += [note(STEP, host, 20), call(10 * i, host + 5, "cudaMemcpyAsync"), call(10 * i + 1, host + 10, "cudaGraphLaunch")]
        events.append(kernel(10 * i, "Memcpy HtoD", device, 2, "gpu_memcpy"))
        names = ("sparse_attention", "nvjet_tst_gemm", "moe_grouped")
        spans = ((4, 46), (51, 30), (82, 17))  # idle: 2 before the graph (the host's), 1, 1 (the device's), 1 before the next step
        events += [kernel(10 * i + 1, n, device + start, dur) for n, (start, dur) in zip(names, spans, strict=True)]
    found = analyse(events, [True, True, True])
    assert found is not None and found.steps == 2 and found.graph_steps == 2
    assert found.step_us == pytest.approx(100)
    assert {k: v for k, v in found.parts_us.items() if v} == pytest.approx({"attention": 46, "linear": 30, "MoE": 17, "other": 2})
    assert found.host_gap == pytest.approx(0.03) and found.idle == pytest.approx(0.05)
    assert list(found.kernels_us)[0] == "sparse_attention"
    assert "host gap 3.0 %" in found.table() and "2 of 2 steps from a CUDA graph" in found.table()


def test_eager_steps_that_starve_the_device():
    """Kernels of 10 us that are launched 20 us apart: the device idles half of the time, all of it the host's doing."""
    events = []
    for i in range(4):
        events += [note(STEP, 40 * i, 39), note("rorqual.module.indexer", 40 * i + 20, 19)]
        for k in range(2):
            at = 40 * i + 20 * k
            events += [call(2 * i + k, at + 5), kernel(2 * i + k, "void at::native::elementwise", at + 8, 10)]
    found = analyse(events, [False] * 4)
    assert found is not None and found.graph_steps == 0 and found.step_us == pytest.approx(40)
    assert found.host_gap == pytest.approx(0.5) and found.idle == pytest.approx(0.5)
    assert {k: v for k, v in found.parts_us.items() if v} == pytest.approx({"other": 10, "indexer": 10})


def test_a_kernel_that_came_in_early_counts_from_the_end_of_the_one_before_it_on_its_stream():
    """Launched while the one before still ran, it waits for that one's end; beside, on another stream, nothing waits."""
    events = []
    for i in range(3):
        events += [note(STEP, 100 * i, 20), call(i, 100 * i + 5, "cudaGraphLaunch")]
        at = 100 * i + 150
        events += [kernel(i, "moe_grouped", at, 60), kernel(i, "sparse_attention", at + 10, 70), kernel(i, "nvjet_tst_gemm", at + 20, 30)]
        beside = kernel(i, "ncclDevKernel_AllReduce_Sum", at + 15, 50)
        events.append({**beside, "args": {**beside["args"], "stream": 8}})
    found = analyse(events, [True] * 3)
    assert found is not None
    want = {"MoE": 60, "attention": 20, "linear": 0, "communication": 50}
    assert {k: found.parts_us[k] for k in want} == pytest.approx(want)
    assert found.kernels_us == pytest.approx(
        {"moe_grouped": 60, "ncclDevKernel_AllReduce_Sum": 50, "sparse_attention": 20, "nvjet_tst_gemm": 0}
    )


def test_too_little_to_say():
    assert analyse([], []) is None
    assert analyse([note(STEP, 0, 10), call(1, 2), kernel(1, "k", 5, 1), kernel(9, "of no call", 5, 1)], [False]) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ncclDevKernel_AllReduce_Sum", "communication"),
        ("topk_rows_kernel", "top-k"),
        ("_indexer_logits_kernel", "indexer"),
        ("_sparse_decode_fp8_kernel", "attention"),
        ("nvjet_tst_128x256_gemm", "linear"),
        ("_moe_align_kernel", "MoE"),
        ("_greedy_tokens_kernel", "sampling"),
        ("void at::native::elementwise_kernel", "other"),
    ],
)
def test_kernels_are_known_by_name(name, part):
    assert part_of(name, None) == part


def test_ranges_say_better_than_names():
    assert part_of("topk_rows_kernel", "rorqual.part.top-k") == "top-k" and part_of("nvjet_gemm", "rorqual.part.MoE") == "MoE"
    assert part_of("topk_rows_kernel", "rorqual.module.attention") == "attention"
    assert part_of("nvjet_gemm", "rorqual.module.attention") == "linear"  # a dense product, whoever asks for it
    assert part_of("ncclDevKernel", "rorqual.module.MoE") == "communication"


def test_kernels_of_a_graph_are_known_by_their_place():
    """The same kernel serves two parts: a rehearsal under ranges tells them apart."""
    names = ("topk_rows_kernel", "topk_rows_kernel", "gemm")
    rehearsal = [note(STEP, 0, 100), note("rorqual.part.top-k", 10, 10), note("rorqual.module.MoE", 30, 30)]
    for i, name in enumerate(names):
        rehearsal += [call(i, 15 + 20 * i), kernel(i, name, 200 + 10 * i, 5)]
    learnt = Attribution(works(rehearsal))
    events = []
    for i in range(2):
        events += [note(STEP, 100 * i, 50), call(50 + i, 100 * i + 5, "cudaGraphLaunch")]
        events += [kernel(50 + i, name, 300 + 100 * i + 20 * k, 10 + k) for k, name in enumerate(names)]
    found = analyse(events, [True, True], learnt)
    assert found is not None
    assert {k: v for k, v in found.parts_us.items() if v} == pytest.approx({"top-k": 10, "MoE": 11, "linear": 12})
    assert learnt.apply(works(events)[:1]) == ["MoE"]  # launched less often: the last one known
    mixed = sorted(works(events)[:3], key=lambda work: (work.name == "topk_rows_kernel", work.start))  # queues that overlap
    assert learnt.apply(mixed) == ["linear", "top-k", "MoE"]


def test_ranges_surround_the_model_and_go_away():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 8, bias=False)
            self.other = torch.nn.Linear(8, 8, bias=False)
            self.both = Stacked([self.proj, self.other])
            self.ops = Ops(select_rows=torch.neg, rms_norm=torch.abs)

        def forward(self, x):
            return self.ops.rms_norm(self.ops.select_rows(self.proj(x)) + self.both(x)[:, :8])

    model = torch.nn.ModuleDict({"self_attn": Layer()})
    layer = model["self_attn"]
    kept, x = (layer.both, layer.ops), torch.ones(2, 8)
    wanted = layer(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, ranges(model):
        assert torch.equal(layer(x), wanted)
    seen = Counter(e.name for e in profiler.events() if e.name.startswith("rorqual."))
    assert seen == {"rorqual.module.attention": 1, "rorqual.part.linear": 2, "rorqual.part.top-k": 1}
    assert (layer.both, layer.ops) == kept and not layer._forward_hooks and not layer.proj._forward_pre_hooks
