"""Ranges around steps and the parts of a model, for a profiler that shows them: torch's own, or NVTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .graph_key import GraphKey
from .plan import StepPlan
from .ranges import Mark, ranges


def nvtx_mark(device: torch.device) -> Mark:
    """NVTX's ranges.

    Raises:
        ValueError: there is no CUDA device, so no tool that shows them.
    """
    if device.type != "cuda":
        raise ValueError(f"NVTX ranges are for CUDA devices, found device {device.type}; leave out --enable-layerwise-nvtx-tracing")
    return torch.cuda.nvtx.range


class StepRanges:
    """A range for every step, and inside it ranges for parts of the model. Set it as ``Runner.trace``; ``close`` takes them away.

    Steps that are replayed from a CUDA graph have the step's range only: their kernels were launched when the graph was captured.
    """

    def __init__(self, model: nn.Module, mark: Mark, after_step: Callable[[], None] | None = None) -> None:
        """``after_step`` is called at the end of every step."""
        self._mark, self._after_step = mark, after_step
        self._open = ExitStack()
        self._open.enter_context(ranges(model, mark))

    @contextmanager
    def step(self, plan: StepPlan, key: GraphKey | None) -> Iterator[None]:
        """Around everything that a step launches."""
        how = "eager" if key is None else f"graph of {key.batch} rows"
        with self._mark(f"step {plan.step}: {plan.brief()}, {how}"):
            yield
        if self._after_step is not None:
            self._after_step()

    def close(self) -> None:
        """The model is as it was; nothing the second time."""
        self._open.close()
