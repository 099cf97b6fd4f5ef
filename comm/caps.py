"""What a backend can do, in fields that a choice can be made by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Abilities of one backend; ``select.explain`` turns them into sentences."""

    graph: bool = False  # a complete dispatch and combine can be captured in a CUDA graph
    fp8: bool = True  # FP8 payloads travel as FP8
    overlap_without_sm: bool = False  # between the halves no multiprocessor is held
    fault_mask: bool = False  # goes on without a rank that does not answer (``EPSpec.fault_tolerant``)
    deterministic: bool = True  # sums of ``EPSpec.deterministic`` can be had
    rank_layout: bool = True  # rows of the layout "rank" have a shape that depends on no value
    indexed: bool = False  # combine_send with ``index`` costs no more than the sums that the caller would make without
    max_ranks: int | None = None  # most ranks of a group, None: no limit
    max_top_k: int | None = None  # most choices of a token, None: no limit
    needs: tuple[str, ...] = ()  # packages and devices without which it does not start
