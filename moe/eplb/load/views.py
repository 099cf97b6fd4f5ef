"""Parts of a load trace: by phase, by domain, by window."""

from __future__ import annotations

import numpy as np

from ..topology import Ints
from ..trace import PHASES, LoadTrace


def by_phase(trace: LoadTrace) -> dict[str, LoadTrace]:
    """The steps of each phase that occurs.

    Raises:
        ValueError: the trace does not say the phase of its steps.
    """
    if trace.phase is None:
        raise ValueError("load trace: the phase of its steps is not known; record with phases, or use the trace as a whole")
    return {name: trace.select(trace.phase == index) for index, name in enumerate(PHASES) if (trace.phase == index).any()}


def by_domain(trace: LoadTrace) -> dict[str, LoadTrace]:
    """The steps of each domain that occurs.

    Raises:
        ValueError: the trace does not say the domain of its steps.
    """
    if trace.domain is None:
        raise ValueError("load trace: the domain of its steps is not known; name it when recording, or use the trace as a whole")
    names = np.array(trace.domain)
    return {name: trace.select(names == name) for name in dict.fromkeys(trace.domain)}


def windows(trace: LoadTrace, size: int, stride: int | None = None) -> Ints:
    """[windows, layers, experts] sums over ``size`` steps, a window every ``stride`` (default ``size``) steps; whole windows only.

    Raises:
        ValueError: a size or stride below one, or fewer steps than a window has.
    """
    stride = size if stride is None else stride
    if size < 1 or stride < 1 or size > trace.n_steps:
        raise ValueError(f"windows of {size} steps every {stride}: needs both one or more and the size at most the {trace.n_steps} steps")
    upto = np.concatenate([np.zeros_like(trace.counts[:1]), trace.counts.cumsum(0)])
    starts = np.arange(0, trace.n_steps - size + 1, stride)
    found: Ints = upto[starts + size] - upto[starts]
    return found


def busy(trace: LoadTrace) -> LoadTrace:
    """The steps in which something was routed: dummy steps that only keep ranks in step have no load."""
    return trace.select(trace.counts.any((1, 2)).reshape(-1))
