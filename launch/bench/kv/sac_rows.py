"""The comparison of ways to serve cached prefixes, as rows of a result file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from ..results import Row
from .closed_loop import System, play
from .sac import Measured, Plan, systems

OURS = "rows on demand"
#: the baseline that targets are set against: the engine copies a whole prefix over the network before it goes on decoding
BASELINE = "network copy first, to host memory, decoding waits"
_SEQUENCES = {32_768: 3.0, 131_072: 5.0}  # times as many requests as all resident
_TTFT, _TBT, _THROUGHPUT = 9.7, 1.8, 2.1  # times better than the baseline
_LONG, _LONG_THROUGHPUT = 131_072, 3.1


def rows_of(plan: Plan, found: Measured, *, clients: Sequence[int], rest_us: Sequence[float], sharing: Sequence[int] = (1,)) -> list[Row]:
    """Capacity, steps, first token alone, and closed loops of one context.

    ``rest_us``: microseconds assumed for the rest of a layer. ``sharing``: GPUs that have one network adapter between them.
    """
    rows = _capacity(plan, found) + _steps(plan, found)
    for gpus, rest, count in product(sharing, rest_us, (1, *clients)):
        params = _settings(plan, found) | {
            "clients": count, "rest_of_a_layer_us_assumed": rest, "gpus_on_the_network": gpus,
            "answers": f"played out from {plan.steps} measured steps a batch",
        }  # fmt: skip
        rows += _loop(plan, systems(found, rest * plan.base.layers / 1e6, gpus), params)
    return rows


def _settings(plan: Plan, found: Measured) -> dict[str, Any]:
    base = plan.base
    return {
        "context": found.context, "output": plan.output, "heads": base.heads, "layers": base.layers, "hot_rows": base.hot_rows,
        "trace": base.trace_name, "policy": base.policy, "missed_percent": round(100 * found.missed, 1),
        "budget_gib": round(plan.budget / 2**30, 1), "index_cache_dtype": base.index_format,
    }  # fmt: skip


def _capacity(plan: Plan, found: Measured) -> list[Row]:
    resident, most = found.capacity.resident(), found.capacity.offloaded()
    factor = _SEQUENCES.get(found.context)
    params = _settings(plan, found) | {"index_keys_gib_each": round(found.capacity.index_bytes / 2**30, 3)}
    return [
        Row(
            name="requests at a time in the budget, rows on demand", params=params, value=float(most), unit="requests", better="higher",
            peers={"all resident": float(resident)}, target=None if factor is None else factor * resident,
        )
    ]  # fmt: skip


def _steps(plan: Plan, found: Measured) -> list[Row]:
    """Attention of a step by batch, and whether throughput keeps rising up to the largest batch."""
    rows = []
    for batch, seconds in found.demand_s.items():
        peers = {"all resident": 1e3 * found.resident_s[batch]} if batch in found.resident_s else {}
        params = _settings(plan, found) | {"batch": batch}
        rows.append(
            Row(name="attention of a step, rows on demand", params=params, value=1e3 * seconds, unit="ms", better="lower", peers=peers)
        )
    rates = [batch / seconds for batch, seconds in sorted(found.demand_s.items())]
    worst = min((b / a for a, b in zip(rates[:-1], rates[1:], strict=True)), default=1.0)
    params = _settings(plan, found) | {"batches": sorted(found.demand_s)}
    rows.append(
        Row(
            name="tokens/s of a batch over those of the batch before, least",
            params=params,
            value=worst,
            unit="ratio",
            better="higher",
            target=1.0,
        )
    )
    copies = {"whole prefix, link": found.link_s, "whole prefix, network": found.network_s, "index keys, link": found.index_s}
    for name, seconds in copies.items():
        rows.append(
            Row(name=f"copy before decoding: {name}", params=_settings(plan, found), value=1e3 * seconds, unit="ms", better="lower")
        )
    rows.append(
        Row(
            name="first step with an empty hot buffer, longer by",
            params=_settings(plan, found),
            value=1e3 * found.cold_s,
            unit="ms",
            better="lower",
        )
    )
    return rows


def _loop(plan: Plan, each: Sequence[System], params: dict[str, Any]) -> list[Row]:
    """Clients in a closed loop. Their steps are measured, and as many as an answer has tokens are counted together."""
    clients = params["clients"]
    services = {system.name: play(system, clients=clients, output=plan.output) for system in each}
    ours, base = services[OURS], services[BASELINE]
    long = params["context"] >= _LONG
    factor = _LONG_THROUGHPUT if long else _THROUGHPUT
    alone = clients == 1

    def peers(what: str, scale: float) -> dict[str, float]:
        return {name: scale * float(getattr(service, what)) for name, service in services.items() if name != OURS}

    return [
        Row(
            name="time to the first token", params=params, value=1e3 * ours.ttft_s, unit="ms", better="lower", peers=peers("ttft_s", 1e3),
            target=1e3 * base.ttft_s / _TTFT if long and alone else None,
        ),
        Row(
            name="time between tokens", params=params, value=1e3 * ours.tbt_s, unit="ms", better="lower", peers=peers("tbt_s", 1e3),
            target=None if alone else 1e3 * base.tbt_s / _TBT,
        ),
        Row(
            name="throughput", params=params, value=ours.tokens_per_s, unit="tokens/s", better="higher", peers=peers("tokens_per_s", 1.0),
            target=None if alone else factor * base.tokens_per_s,
        ),
    ]  # fmt: skip
