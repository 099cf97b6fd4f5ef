"""Figures of a run, from the requests' own clocks and the ranks' counters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..engine.outputs import CompletionOutput, RequestOutput
from .console import table


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile, ``share`` from 0 to 1; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def timings(output: RequestOutput) -> dict[str, float | None]:
    """Seconds of one request: to the first token, per later token (of the longest completion), to the end."""
    metrics = output.metrics
    longest = max((len(o.token_ids) for o in output.outputs), default=0)
    ttft, latency = metrics.ttft, metrics.latency
    tpot = (latency - ttft) / (longest - 1) if ttft is not None and latency is not None and longest > 1 else None
    return {"ttft_s": ttft, "tpot_s": tpot, "latency_s": latency}


def json_row(place: int, shown: str, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """One completion as a JSON line."""
    prompt_tokens, new = len(output.prompt_token_ids), len(completion.token_ids)
    row: dict[str, Any] = {
        "request": place,
        "index": completion.index,
        "prompt": output.prompt if output.prompt is not None else shown,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
            "cached_tokens": output.metrics.cached_tokens,
        },
        "timings": timings(output),
    }
    packed = output.to_dict()
    if completion.logprobs is not None:
        row["logprobs"] = packed["outputs"][completion.index]["logprobs"]
        row["cumulative_logprob"] = completion.cumulative_logprob
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = packed["prompt_logprobs"]
    return row


def totals_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Counts, rate and time to first token of a run of ``seconds``."""
    prompt = sum(o.usage["prompt_tokens"] for o in outputs)
    new = sum(o.usage["completion_tokens"] for o in outputs)
    ttft = [o.metrics.ttft for o in outputs if o.metrics.ttft is not None]
    rate = new / seconds if seconds > 0 else math.nan
    mean = sum(ttft) / len(ttft) if ttft else math.nan
    return (
        f"{len(outputs)} requests, {prompt:,} prompt tokens, {new:,} output tokens in {seconds:.2f} s: {rate:,.1f} output tokens/s; "
        f"TTFT mean {mean * 1e3:.0f} ms, p99 {percentile(ttft, 0.99) * 1e3:.0f} ms"
    )


def rank_rows(stats: dict[str, Any]) -> list[list[object]]:
    """One row a rank: role, what it holds, what it computed, and the load of its experts.

    The load is the number of (token, choice) pairs that came to a rank's experts; max/mean is over its slots, summed over the layers.
    A rank names what its slots hold where that is not the experts in order; then copies of an expert count as having even shares
    of its load, under the placement of the end. Where every rank holds all experts, the load is that of its replica's tokens, which
    the replica's first tp rank counts.
    """
    ranks = stats["ranks"]
    total = stats.get("expert_load") or []
    n_tp = 1 + max(r["tp"] for r in ranks)
    own = {(r["pp"], r["dp"]): r["expert_load"] for r in ranks if r["tp"] == 0 and "expert_load" in r}
    copies = Counter((int(layer), e) for r in ranks for layer, held in r.get("expert_slots", {}).items() for e in held)
    rows: list[list[object]] = []
    for r in ranks:
        first, stop = r["layers"]
        experts, pairs, skew = r.get("experts"), None, None
        if experts and total:
            whole = experts == len(total[0]) and "expert_slots" not in r
            load = own.get((r["pp"], r["dp"]), total) if whole else total
            place = 0 if whole else (r["dp"] * n_tp + r["tp"]) * experts
            held = {int(layer): slots for layer, slots in r.get("expert_slots", {}).items()}
            mine = [
                sum(_share(load[layer], held[layer][i] if layer in held else place + i, copies, layer) for layer in range(first, stop))
                for i in range(experts)
            ]
            pairs = round(sum(mine))
            skew = max(mine) * len(mine) / pairs if pairs else None
        rows.append([r["rank"], r["pp"], r["dp"], r["tp"], f"{first}-{stop - 1}", experts, r["tokens"], pairs, skew, r["busy_seconds"]])
    return rows


def _share(load: Sequence[int], expert: int, copies: Counter[tuple[int, int]], layer: int) -> float:
    """Load of a slot that holds ``expert``, -1 for none; layers without experts have none to share."""
    return 0.0 if not 0 <= expert < len(load) else load[expert] / max(1, copies[layer, expert])


def rank_table(stats: dict[str, Any]) -> str:
    """``rank_rows`` for a reader."""
    header = ["rank", "pp", "dp", "tp", "layers", "experts", "tokens", "expert load", "max/mean", "busy s"]
    return table(header, rank_rows(stats))
