"""The products pp x dp x tp that a number of ranks and a model allow."""

from __future__ import annotations

from typing import Any

#: degrees by their names in ``EngineConfig``
PP, DP, TP = "pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size"


def layouts(ranks: int, *, heads: int, layers: int, experts: int) -> list[dict[str, int]]:
    """All (pp, dp, tp) whose product is ``ranks`` and that the model can be cut into, few stages first.

    Args:
        ranks: ranks of the job.
        heads: attention heads, which tp divides.
        layers: layers, of which every stage has one.
        experts: routed experts, which dp x tp divides.
    """
    found = []
    for pp in range(1, ranks + 1):
        for dp in range(1, ranks + 1):
            tp, rest = divmod(ranks, pp * dp)
            if rest or not tp or heads % tp or pp > layers or experts % (dp * tp):
                continue
            found.append({PP: pp, DP: dp, TP: tp})
    return found


def title(layout: dict[str, Any]) -> str:
    """Such as ``pp1 dp2 tp1``."""
    return f"pp{layout.get(PP, 1)} dp{layout.get(DP, 1)} tp{layout.get(TP, 1)}"
