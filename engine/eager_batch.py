"""What attention sees of a step that runs eagerly, and what of it crosses into the next stage."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..attention.batch import AttentionBatch
from ..attention.halves import build_halves, static_halves
from ..attention.mla import layer_has_indexer
from .graph_key import decode_context
from .models.build import Stage
from .offload.mover import Mover
from .plan import StepPlan
from .tables import DeviceTables


def eager_batch(
    plan: StepPlan, slots: torch.Tensor, starts: torch.Tensor, *,
    tables: DeviceTables, page_size: int, static: bool, mover: Mover | None, halves_from: int | None = None,
) -> AttentionBatch:  # fmt: skip
    """The batch of ``plan``. Decode rows need no arithmetic on the host where the model takes ``static`` batches.

    Args:
        plan: the step.
        slots: int64 [R] on the device, its request slots.
        starts: int64 [R] on the device, its first positions.
        tables: the page tables.
        page_size: tokens of a page.
        static: the model takes static batches.
        mover: where pages are, with offloading.
        halves_from: tokens of the busiest replica from which a step is cut in halves; None: never.
    """
    most = int(plan.dp_tokens.max(initial=plan.n_tokens))
    halved = halves_from is not None and most >= max(2, halves_from)
    pages = tables.pages[slots]
    longest = decode_context(plan)
    if static and longest > 0:
        rows = torch.arange(plan.n_rows, device=pages.device)
        bound = min(1 << (longest - 1).bit_length(), pages.shape[1] * page_size)  # few bounds, few kinds of launches
        tier = None if mover is None else mover.step(plan, pages, slots, starts)
        batch = AttentionBatch.static(starts, rows, pages, page_size, max_context=bound, tier=tier, most_tokens=most)
        return static_halves(batch) if halved else batch
    if halved:
        return build_halves(plan.starts, plan.counts, pages, page_size, pages.device, most)
    tier = None if mover is None else mover.step(plan, pages, slots, None)
    return replace(AttentionBatch.build(plan.starts, plan.counts, pages, page_size, pages.device, tier), most_tokens=most)


def shared_width(stage: Stage, batch: AttentionBatch, layer: int) -> int:
    """Keys per token that cross into the stage starting at ``layer``: its first layer may share those of the one before."""
    config = stage.model.config.attention
    if config.indexer is None or layer_has_indexer(config, layer):
        return 0
    if stage.model.selection == "dense":  # an evaluation's choice: no layer selects, nothing is sent
        return 0
    return config.indexer.topk if batch.max_context > config.indexer.topk else 0
