"""Numbers of a report in words and tables."""

from __future__ import annotations

from dataclasses import dataclass

from ..metrics import MEASURES, Balance
from .gather import Report

Table = tuple[list[str], list[list[str]], list[str]]  # header, rows, first cells of the rows that are ours


@dataclass(frozen=True, kw_only=True)
class Card:
    """One figure that is seen first."""

    name: str  # what it is
    was: str  # before; may be empty
    value: str  # now
    more: str  # a line below


def human_bytes(n: float) -> str:
    """Bytes in powers of ten, three digits or so."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= size:
            return f"{n / size:.{0 if n >= 100 * size else 1}f} {unit}"
    return f"{n:.0f} B"


def source_lines(report: Report) -> list[str]:
    """What was measured, and on what machine."""
    steps, layers, experts = report.trace.counts.shape
    machine = report.topology
    load = f"{steps:,} steps, {layers} MoE layers of {experts} experts"
    if report.trace.top_k is not None:
        load += f", top-{report.trace.top_k}"
    if report.trace.tokens is not None:
        load += f", {int(report.trace.tokens.sum()):,} tokens"
    load += "".join(f"; {name} {value}" for name, value in report.trace.meta.items())
    failed = f", of which ranks {sorted(machine.failed)} have failed" if machine.failed else ""
    where = (
        f"{machine.n_ranks} ranks on {machine.n_nodes} node{'s' * (machine.n_nodes > 1)}{failed}; {machine.n_slots} slots a layer, "
        f"{machine.n_slots - experts} of them for replicas; an expert is {human_bytes(report.cost.expert_bytes)}"
    )
    return [f"Load: {load}", f"Machine: {where}"]


def cards(report: Report) -> list[Card]:
    """The figures that are seen first."""
    before, after, layers = report.before, report.after, len(report.trace.layer_ids)
    spare = report.topology.n_slots - report.trace.n_experts
    moved = int(after.moved.sum())
    lost = report.lost["plan"].by_rank.sum(0).max() / layers
    with_node = report.lost["plan"].by_node.sum(0).max() / layers
    was = report.lost[report.before_name].by_rank.sum(0).max() / layers
    return [
        Card(
            name="max/mean of ranks",
            was=f"{before.imbalance.mean():.3f}",
            value=f"{after.imbalance.mean():.4f}",
            more=f"{(after.gap.mean()):.2%} above the bound; worst layer {after.imbalance.max():.4f}",
        ),
        Card(
            name="experts of a step, predicted",
            was=f"{1e3 * before.seconds:.2f}",
            value=f"{1e3 * after.seconds:.2f} ms",
            more=f"{before.seconds / after.seconds:.2f} times as fast as {report.before_name}",
        ),
        Card(
            name="to move once",
            was="",
            value=human_bytes(after.bytes_to_move),
            more=f"{moved:,} experts from {report.before_name}; {1e3 * report.cost.move_seconds(after.moved):,.0f} ms if steps wait",
        ),
        Card(
            name="memory of replicas",
            was="",
            value=human_bytes(spare * layers * report.cost.expert_bytes),
            more=f"{human_bytes(spare * layers * report.cost.expert_bytes / report.topology.n_ranks)} a rank for {spare} slots a layer",
        ),
        Card(
            name="lost with the worst rank",
            was=f"{was:.1f}",
            value=f"{lost:.1f} a layer",
            more=f"experts that nobody else holds; with the worst node {with_node:.1f} a layer",
        ),
    ]


def balance_rows(report: Report) -> Table:
    """All measures of the ranks' loads, placement by placement."""
    return ["placement", *MEASURES.values()], [[name, *_measures(one)] for name, one in report.balances.items()], ["plan"]


def _measures(found: Balance) -> list[str]:
    return [f"{getattr(found, field):.4f}" for field in MEASURES]


def hot_rows(report: Report, shown: int = 12) -> Table:
    """The most uneven layers, their hottest experts and the replicas they get."""
    found = report.analysis
    rows = []
    for layer in (-found.layer_imbalance).argsort(kind="stable")[:shown].tolist():
        slots = report.after.slot_to_expert[layer]
        hot = ", ".join(f"{e} ({int((slots == e).sum())})" for e in found.hottest[layer].tolist())
        kept = "-" if found.persistence is None else f"{found.persistence[layer]:.0%}"
        rows.append([str(report.trace.layer_ids[layer]), f"{found.layer_imbalance[layer]:.2f}", f"{found.hot_share[layer]:.1%}", kept, hot])
    return (
        ["layer", "max/mean of experts", "share of the hottest", "still hottest later", "hottest experts (replicas in the plan)"],
        rows,
        [],
    )


def outcome_rows(report: Report) -> Table:
    """Policies, one a row."""
    rows = []
    for found in report.outcomes:
        s = found.summary()
        rate = s["tokens_per_second"]
        rows.append(
            [
                found.policy,
                f"{s['step_ms']:.3f}",
                f"{s['step_ms_second_half']:.3f}",
                f"{s['step_ms_p99']:.2f}",
                "-" if rate is None else f"{rate:,.0f}",
                f"{s['imbalance_second_half']:.3f}",
                f"{s['moving_share']:.1%}",
                f"{s['plans_that_moved']} of {s['plans']}",
                human_bytes(s["moved_bytes"]),
            ]
        )
    header = ["policy", "step ms", "2nd half", "p99 ms", "tokens/s", "max/mean, 2nd half", "time moving", "plans that moved", "moved"]
    return header, rows, ["static", "incremental", "live"]
