"""Experts in other places, several of them twice and slots empty: every rank loads what its slots hold, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.models.skeleton import Place, make_skeleton
from rorqual.engine.models.targets import clear_empty_slots, is_known, materialise, weight_targets
from rorqual.engine.weights.convert import convert_fp8
from rorqual.engine.weights.loader import load_weights
from rorqual.moe.placement import Placement
from rorqual.parallel.grid import GridSpec
from tests.checkpoints import TINY, checkpoint
from tests.engine.parity import greedy_tokens, ragged_prompts, rank_tokens
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SPARE = 4  # slots of a rank beyond its experts


def shuffled(n_layers: int, n_experts: int, n_ranks: int, seed: int) -> Placement:
    """Every expert somewhere, some of them several times (a rank may have one twice), a slot in eight empty."""
    generator = torch.Generator().manual_seed(seed)
    slots = n_experts + SPARE * n_ranks
    rows = []
    for _ in range(n_layers):
        more = torch.randint(n_experts, (slots - n_experts,), generator=generator)
        more[: max(1, len(more) // 8)] = -1
        rows.append(torch.cat([torch.arange(n_experts), more])[torch.randperm(slots, generator=generator)])
    return Placement.of(torch.stack(rows), n_experts=n_experts, n_ranks=n_ranks)


def shuffled_identity(*, n_layers: int, n_experts: int, n_ranks: int, n_redundant: int = 0) -> Placement:
    """Stands in for ``Placement.identity``."""
    return shuffled(n_layers, n_experts, n_ranks, n_ranks)


def shuffled_tokens(folder: str, args: dict[str, Any], prompts: list[list[int]], n: int) -> list[list[int]]:
    """One rank's part of a run in which experts are not in order."""
    Placement.identity = shuffled_identity  # type: ignore[method-assign]  # in this process, which ends with the run
    return rank_tokens(folder, args, prompts, n)


@pytest.mark.parametrize(
    "args",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "moe_a2a_backend": "torch_node", "ranks_per_node": 2},
        {"tensor_parallel_size": 2, "expert_parallel_size": 1},  # ranks share tokens: each adds its part of an expert once
    ],
    ids=["dp2", "dp2-tp2-node", "shared"],
)
def test_tokens_are_those_of_experts_in_order(args):
    prompts = ragged_prompts(8)
    alone = greedy_tokens(checkpoint("v32"), prompts=prompts, n=10)
    world = args.get("data_parallel_size", 1) * args.get("tensor_parallel_size", 1)
    assert run_ranks(shuffled_tokens, world, str(checkpoint("v32")), args, prompts, 10, timeout=240.0)[0] == alone


@pytest.mark.parametrize("fp8", [False, True])
def test_replicas_hold_the_same_bytes_and_empty_slots_zeros(fp8, tmp_path, monkeypatch):
    monkeypatch.setattr(Placement, "identity", shuffled_identity)
    folder, settings = checkpoint("v32"), {}
    if fp8:  # scales belong to their experts
        folder, settings = tmp_path / "fp8", {"fp8_gemm_backend": "torch"}
        convert_fp8(TINY, folder)
    config, model_config = EngineConfig(model=str(folder), **settings), parse_model_config(folder)
    seen: dict[tuple[int, int], list[bytes]] = {}
    twice = empty = 0
    for rank in range(2):
        part = make_skeleton(model_config, config, Place.planned(GridSpec(dp=2), 0), CPU, torch.bfloat16)
        materialise(part.model, CPU)
        for moe in part.model.moe_layers():  # what was in the memory before
            for param in moe.experts.parameters():
                param.data.view(-1).view(torch.uint8).fill_(0x7B)
        clear_empty_slots(part.model, part.placement, ep_rank=rank)
        targets = weight_targets(part.model, part.placement, ep_rank=rank, inner=part.inner)
        load_weights(targets, folder, model=model_config, known=lambda name: is_known(name, model_config))
        for moe in part.model.moe_layers():
            for slot, expert in enumerate(part.placement.local_experts(moe.layer, rank)):
                parts = [p.data[slot].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in moe.experts.parameters()]
                assert len(parts) == (4 if fp8 else 2)
                if expert < 0:
                    empty += 1
                    assert not any(any(part) for part in parts)
                    continue
                twice += (moe.layer, expert) in seen
                assert seen.setdefault((moe.layer, expert), parts) == parts
    assert twice and empty
    assert len({tuple(parts) for parts in seen.values()}) == len(seen)  # experts differ
