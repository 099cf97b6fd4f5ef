"""Runs of the engine with experts on the move, as jobs of ranks, and what they left in slots."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.memory import own_bytes

TP, DP = "tensor_parallel_size", "data_parallel_size"
DEBUG = {"RORQUAL_DEBUG": "1"}


@dataclass(kw_only=True)
class Found:
    """What one rank saw of a run."""

    tokens: list[list[int]]
    stats: dict[str, Any]  # of ExpertSteps
    slots: list[list[int]]  # [MoE layers][slots] at the end
    digests: dict[tuple[int, int], int]  # (MoE layer, slot of all ranks) -> checksum of what this rank holds at the end
    originals: dict[tuple[int, int], int]  # (MoE layer, expert) -> checksum, as loaded
    moved: bool  # some tensor of experts or tables is at another address than at the start
    memory: list[int] = field(default_factory=list)  # resident bytes of the process, cycle by cycle
    steps: int = 0


def balanced(**settings: Any) -> dict[str, Any]:
    """Engine settings with experts on the move; ``settings`` are keys of ``eplb_config``."""
    return {"enable_eplb": True, "eplb_config": json.dumps(settings)}


def digests(llm: Any) -> dict[tuple[int, int], int]:
    """Checksums of this rank's slots, weights and scales."""
    rank, found = llm.engine.grid.ep.index, {}
    for m, layer in enumerate(llm.engine.stage.model.moe_layers()):
        tensors = [p.detach() for p in layer.experts.parameters()]
        for slot in range(len(tensors[0])):
            data = b"".join(t[slot].contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors)
            found[m, rank * len(tensors[0]) + slot] = zlib.crc32(data)
    return found


def addresses(llm: Any) -> list[int]:
    """Where experts and tables are."""
    layers = llm.engine.stage.model.moe_layers()
    return [p.data_ptr() for layer in layers for p in layer.experts.parameters()] + [layers[0].exchange.ways.table.data_ptr()]


def run(
    folder: str,
    prompts: list[list[int]],
    n: int,
    settings: dict[str, Any],
    *,
    prepare: Callable[[Any], None] | None = None,
    cycles: int = 0,
) -> Found:
    """Generate greedily with one engine, again and again until so many cycles have ended; ``prepare(llm)`` before."""
    from rorqual import LLM, SamplingParams

    torch.set_num_threads(1)
    base = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 16, "max_total_tokens": 8192}
    base["dist_timeout"] = 60.0
    with LLM(folder, **{**base, **settings}) as llm:
        start, experts = addresses(llm), llm.engine.experts
        held = llm.engine.experts.live.slot_to_expert if experts is not None and experts.live is not None else None
        originals = {} if held is None else {(m, int(held[m, slot])): crc for (m, slot), crc in digests(llm).items()}
        if prepare is not None:
            prepare(llm)
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        tokens, memory = [], []
        while not memory or (cycles and experts.stats()["cycles"]["ended"] < cycles):
            tokens += [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
            memory.append(own_bytes())
        return Found(
            tokens=tokens, stats={} if experts is None else experts.stats(), digests=digests(llm), originals=originals,
            slots=[] if held is None else experts.live.slot_to_expert.tolist(), moved=addresses(llm) != start, memory=memory,
            steps=llm.engine.runner.stats.steps,
        )  # fmt: skip


def check_whole(found: list[Found]) -> None:
    """All ranks have one placement, valid, and every slot holds the bytes of the expert that it names."""
    originals = {key: crc for rank in found for key, crc in rank.originals.items()}
    slots = found[0].slots
    assert all(rank.slots == slots for rank in found), "ranks differ in the placement"
    held = {place: crc for rank in found for place, crc in rank.digests.items()}
    n_experts = 1 + max(expert for _, expert in originals)
    for m, row in enumerate(slots):
        assert set(row) - {-1} == set(range(n_experts)), f"layer {m} lacks experts: {row}"
        for slot, expert in enumerate(row):
            assert expert < 0 or held[m, slot] == originals[m, expert], f"layer {m} slot {slot} does not hold expert {expert}"
    assert not any(rank.moved for rank in found), "tensors are at other addresses"
