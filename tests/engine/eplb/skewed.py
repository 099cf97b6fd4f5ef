"""A workload whose tokens love a few experts: how even the ranks' work becomes, counted where tokens go."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.engine.eplb.jobs import Found, run

_WAIT_S = 30.0


@dataclass(kw_only=True)
class Skewed:
    """What one rank saw."""

    found: Found
    sent: np.ndarray  # [steps, MoE layers, ranks] choices that this rank sent to each rank


def favour(llm: Any, sigma: float) -> None:
    """Add lognormal favour of ``sigma`` to the routers' choice of experts, the same on all ranks."""
    rng = np.random.default_rng(5)
    for layer in llm.engine.stage.model.moe_layers():
        bias = layer.gate.e_score_correction_bias
        bias.data += torch.from_numpy(rng.normal(0.0, sigma, len(bias))).to(bias)


def settle(llm: Any) -> None:
    """Wait for what this rank's thread can do before the next step: how many steps pass meanwhile is not what is looked at."""
    live = None if llm.engine.experts is None else llm.engine.experts.live
    cycle = None if live is None else live.cycle
    if cycle is not None and (cycle.moving is None or cycle.moving.gate.released >= len(cycle.moving.batch.rounds)):
        assert cycle.job.wait(time.monotonic() + _WAIT_S), f"cycle {cycle.number} has not got on within {_WAIT_S:g} s"


def job(folder: str, prompts: list[list[int]], n: int, settings: dict[str, Any], sigma: float) -> Skewed:
    """One rank's."""
    sent: list[np.ndarray] = []

    def prepare(llm: Any) -> None:
        favour(llm, sigma)
        exchange, execute = llm.engine.stage.model.moe_layers()[0].exchange, llm.engine.runner.execute
        slots, rows = exchange.ways.slots, {m.layer: i for i, m in enumerate(llm.engine.stage.model.moe_layers())}
        per_rank, n_ranks = exchange.placement.slots_per_rank, exchange.placement.n_ranks

        def counting(layer: int, ids: Any) -> Any:
            found = slots(layer, ids)
            places = found.ids[found.ids >= 0].numpy() // per_rank
            sent[-1][rows[layer]] += np.bincount(places, minlength=n_ranks)
            return found

        def step(plan: Any) -> Any:
            settle(llm)
            sent.append(np.zeros((len(rows), n_ranks), dtype=np.int64))
            return execute(plan)

        exchange.ways.slots, llm.engine.runner.execute = counting, step

    found = run(folder, prompts, n, settings, prepare=prepare)
    return Skewed(found=found, sent=np.stack(sent))


def imbalance(seen: list[Skewed], steps: slice) -> float:
    """Largest over mean of the ranks' work in ``steps``, mean over layers."""
    work = sum(rank.sent[steps] for rank in seen).sum(0)
    return float((work.max(1) / work.mean(1)).mean())
