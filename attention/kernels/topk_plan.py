"""How an exact top-k is launched: by rows, or in parts of rows."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ...parallel.kernels.tuned import config_for


@dataclass(frozen=True, kw_only=True)
class TopkPlan:
    """Launch settings; ``by_rows`` is one program a row, otherwise a row is cut into parts of ``block`` scores."""

    by_rows: bool
    capacity: int  # survivors that one program chooses among: a power of two, 2k..2^14
    sample: int  # scores a pivot comes from: a power of two, at most ``capacity``
    group: int  # neighbours sampled together
    block: int  # scores a program reads at a time, at most 2^14
    warps: int  # of the programs that read blocks
    row_block: int  # the same two of the programs that choose in a row, where these are programs of their own
    row_warps: int
    emit: int  # survivors written at a time
    programs: int  # of ``by_rows``
    registers: int  # a thread of ``by_rows`` may use; bounds how many programs share a multiprocessor


def plan_for(rows: int, max_context: int, k: int) -> TopkPlan:
    """Settings for a shape: measured ones where there are."""
    capacity = min(max(4096, triton.next_power_of_2(4 * k)), 1 << 14)
    many = rows > 160
    sample = triton.next_power_of_2((64 if many else 32) * max_context // k)
    default = {
        "by_rows": many,
        "capacity": capacity,
        "sample": min(capacity, 8192, max(2048, sample)),
        "group": 4 if many else 1,
        "block": 4096 if many else 2048,
        "warps": 8 if many and rows < 1024 else 4,
        "row_block": 4096,
        "row_warps": 8,
        "emit": 2048 if many else capacity,
        "programs": 1056,
        "registers": 80 if rows < 1024 else 128,
    }
    return TopkPlan(**config_for("topk", default, rows=rows, max_context=max_context, k=k))
