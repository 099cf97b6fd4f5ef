"""One kernel at one shape: how to run it, what it must move and compute, what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Call = Callable[[], Any]


@dataclass(kw_only=True)
class Runs:
    """Ready inputs on the GPU. Every call is one launch of the operation (capturable in a CUDA graph if ``Case.graph``)."""

    ours: Call  # the operation as the engine calls it
    # name -> the same work by another, over several inputs if ``rotate`` has some; only those that are installed
    peers: Mapping[str, Call | list[Call]] = field(default_factory=dict)
    variants: dict[str, Call] = field(default_factory=dict)  # JSON of a config -> the operation with that config (for `bench tune`)
    written: tuple[Any, ...] = ()  # where variants that return nothing put what ``ours`` returns
    check: Call | None = None  # raises AssertionError when ``ours`` is wrong; run once before timing
    rotate: list[Call] = field(default_factory=list)  # ``ours`` over other inputs, to defeat the L2; timed in turn with ours when given


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the row must reach. Give one of the three."""

    us: float | None = None  # at most so many microseconds
    roof: float | None = None  # at least this share of the floor
    peer: str | None = None  # ... or ``ratio`` times the speed of this peer (a name, or "best")
    ratio: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    op: str  # the operation, as in ``attention.kernels`` / ``moe.kernels`` / ``parallel.kernels``
    name: str  # the row, short and unique
    params: Mapping[str, Any]  # the shape
    build: Callable[[], Runs]  # makes inputs and calls; GPU memory is freed between cases
    n_bytes: float = 0.0  # fewest bytes of device memory the operation must move
    flops: float = 0.0  # multiply-adds count two
    unit: Literal["bf16", "fp8", "none"] = "none"  # which matrix rate bounds it
    graph: bool = True  # time by replay of a CUDA graph (decode shapes); False: events around launches
    target: Target | None = None
    tune_only: bool = False  # a choice between kernels that have rows of their own: no row of ``bench kernels``
    tune_shape: Mapping[str, Any] | None = None  # key of ``parallel.kernels.tuned`` for the variants
