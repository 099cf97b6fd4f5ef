"""Printed tables and result rows of ``bench comm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...console import table
from ..results import Row
from .cases import Case
from .crew import Crew
from .measure import HALVES, Timing
from .step_model import Cluster, Load, Projection

Measured = tuple[Case, Timing]
#: (tokens, dispatch us, combine us, GB/s of each) that two GPUs over NVLink must reach with FP8 rows of 7168 values and 8 of 256 experts
_TARGETS = {128: (15.0, 20.0, None), 4096: (None, None, 300.0)}
_ONE_GPU_US = 40.0  # of each, two processes on one GPU
_MANY = 1024  # tokens from which bandwidth is what counts
_COUNTED = "bytes that rank 0 sends to other GPUs, over the slowest rank's time"
_TIMES_TORCH = 3.0  # faster than torch at 128 tokens


def _gb_per_s(n_bytes: int, us: float) -> float:
    return n_bytes / us / 1e3 if us else 0.0


def print_table(crew: Crew, found: Sequence[Measured]) -> None:
    """A line a case."""
    head = [
        "backend",
        "tokens",
        "hidden",
        "top-k",
        "payload",
        "SMs",
        "dispatch us",
        "GB/s",
        "of all",
        "combine us",
        "GB/s",
        "of all",
        "trip us",
        "timed by",
    ]
    lines = []
    for case, t in found:
        lines.append(
            [
                case.backend, case.tokens, case.hidden, case.top_k, case.payload, case.max_sms,
                t.dispatch, _gb_per_s(t.link_bytes[0], t.dispatch), _gb_per_s(t.traffic.everything, t.dispatch),
                t.combine, _gb_per_s(t.link_bytes[1], t.combine), _gb_per_s(t.traffic.results, t.combine), t.trip, t.timed,
            ]
        )  # fmt: skip
    print(table(head, lines))
    print(
        'GB/s: bytes that rank 0 sends to other ranks over the time of both halves. "of all": with rows that stay, as other tables count.\n'
        "Times: medians of the slowest rank, behind a trip that brings ranks together; eager ones hold the host's launches. The trip is\n"
        "measured without events inside; what they add to the halves is shared out and taken off."
    )
    if crew.device.type != "cuda":
        print("Ranks on the CPU: these are times of the PyTorch twins, which say nothing about GPUs.")
    elif crew.gpus < crew.size:
        print("Several ranks on one GPU: these are times of kernels that copy in its memory, not of any link.")


def print_halves(found: Sequence[Measured]) -> None:
    """Times of the four halves."""
    print(table(["backend", "tokens", "payload", *HALVES], [[c.backend, c.tokens, c.payload, *t.halves] for c, t in found]))


def print_traffic(found: Sequence[Measured]) -> None:
    """Bytes of rank 0 to each rank in one trip, as its dispatcher counts them."""
    print("bytes that rank 0 sends to each rank in a dispatch and a combine, as its dispatcher counts them:")
    print(
        table(["backend", "tokens", "to ranks 0, 1, .."], [[c.backend, c.tokens, " ".join(f"{n:,}" for n in t.counted)] for c, t in found])
    )


def print_sms(found: Sequence[Measured]) -> None:
    """Time against multiprocessors."""
    lines = [[c.backend, c.tokens, c.max_sms, t.dispatch, _gb_per_s(t.link_bytes[0], t.dispatch), t.combine,
              _gb_per_s(t.link_bytes[1], t.combine)] for c, t in found]  # fmt: skip
    print(table(["backend", "tokens", "SMs at most", "dispatch us", "GB/s", "combine us", "GB/s"], lines))


def rows_of(crew: Crew, found: Sequence[Measured]) -> list[Row]:
    """Result rows: the time of dispatch and of combine of every case, and their bandwidth where there is a target."""
    rows: list[Row] = []
    others: dict[tuple[Any, ...], dict[str, Timing]] = {}
    for case, timing in found:
        others.setdefault(_key(case), {})[case.backend] = timing
    for case, timing in found:
        peers = {name: t for name, t in others[_key(case)].items() if name != case.backend}
        params = _params(crew, case) | {"timed": timing.timed}
        for which, (name, n_bytes) in enumerate(zip(("dispatch", "combine"), timing.link_bytes, strict=True)):
            us, target = getattr(timing, name), _target(crew, case, which)
            times = {other: getattr(t, name) for other, t in peers.items()}
            told = params | {"link_bytes": n_bytes} | ({"results": "fetched" if timing.fetched else "sent"} if which else {})
            rows.append(Row(name=name, params=told, value=us, unit="us", better="lower", peers=times, target=target))
            if case.tokens >= _MANY and us:
                rows.append(
                    Row(name=f"{name}, bandwidth", params=told | {"counted": _COUNTED}, value=_gb_per_s(n_bytes, us), unit="GB/s",
                        better="higher", target=_target(crew, case, 2))
                )  # fmt: skip
        trips = {other: t.trip for other, t in peers.items()}
        rows.append(Row(name="dispatch and combine", params=params, value=timing.trip, unit="us", better="lower", peers=trips))
        if "torch" in peers and case.backend == "symm" and case.tokens == 128 and crew.gpus >= crew.size:
            times_faster, told = peers["torch"].trip / timing.trip, params | {"torch_timed": peers["torch"].timed}
            rows.append(Row(name="torch over symm", params=told, value=times_faster, unit="times", better="higher", target=_TIMES_TORCH))
    return rows


def _key(case: Case) -> tuple[Any, ...]:
    return case.tokens, case.hidden, case.top_k, case.slots, case.payload, case.max_sms


def _params(crew: Crew, case: Case) -> dict[str, Any]:
    return {
        "backend": case.backend, "ranks": crew.size, "gpus": crew.gpus, "nodes": crew.nodes, "tokens": case.tokens, "hidden": case.hidden,
        "top_k": case.top_k, "slots": case.slots, "payload": case.payload, "sms": case.max_sms,
    }  # fmt: skip


def _target(crew: Crew, case: Case, which: int) -> float | None:
    """What was promised for this case: microseconds of dispatch (0), of combine (1), GB/s (2)."""
    usual = (case.hidden, case.top_k, case.slots, case.payload, crew.size) == (7168, 8, 256, "fp8", 2) and case.max_sms <= 32
    if not usual or case.backend != "symm":
        return None
    if crew.gpus == 2:
        return _TARGETS.get(case.tokens, (None, None, None))[which]
    return _ONE_GPU_US if crew.gpus == 1 and case.tokens == 128 and which < 2 else None


def print_projection(cluster_rows: Sequence[tuple[Cluster, Projection]], load: Load) -> None:
    """The step model's table, under its label."""
    print(
        f"PROJECTION, not measured: {load.layers} layers of {load.tokens} tokens a rank, attention {load.attention_us[0]:g} us (half a "
        f"batch {load.attention_us[1]:g}),\nexperts {load.expert_us[0]:g} us ({load.expert_us[1]:g}), exchanges on {load.exchange_sms} "
        f"multiprocessors, top-{load.top_k} of {load.slots} experts chosen evenly, {load.payload} rows."
    )
    lines = []
    for cluster, p in cluster_rows:
        lines.append(
            [
                cluster.ranks, cluster.nodes, p.dispatch.us, p.combine.us, p.dispatch.between / 1e6, p.dispatch.inside / 1e6,
                p.plain_ms, p.overlap_ms, 100 * p.hidden, round(p.tokens_per_s),
            ]
        )  # fmt: skip
    head = ["ranks", "nodes", "dispatch us", "combine us", "MB between", "MB inside", "step ms", "overlapped", "hidden %", "tokens/s a GPU"]
    print(table(head, lines))
    inside, between = cluster_rows[0][0].inside, cluster_rows[0][0].between
    print(
        f"links: inside a node {inside.latency_us:.1f} us + bytes at {inside.gb_per_s:.0f} GB/s, between nodes {between.latency_us:.1f} us "
        f"+ bytes at {between.gb_per_s:.0f} GB/s{'; a token crosses to a node once' if cluster_rows[0][0].two_level else ''}"
    )


def projection_rows(cluster_rows: Sequence[tuple[Cluster, Projection]], load: Load) -> list[Row]:
    """Result rows of the step model; their names say that nothing was measured."""
    rows = []
    for cluster, p in cluster_rows:
        params = {"ranks": cluster.ranks, "nodes": cluster.nodes, "tokens": load.tokens, "layers": load.layers, "payload": load.payload}
        rows.append(Row(name="projected step", params=params, value=p.plain_ms, unit="ms", better="lower"))
        rows.append(Row(name="projected step, two micro-batches", params=params, value=p.overlap_ms, unit="ms", better="lower"))
        rows.append(Row(name="projected share of exchanges hidden", params=params, value=100 * p.hidden, unit="%", better="higher"))
    return rows
