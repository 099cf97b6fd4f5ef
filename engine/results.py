"""What a step gives back to the host, and how it travels from the last pipeline stage to the leader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .plan import StepPlan
from .sampling.logprobs import TopLogprobs
from .tables import DeviceTables

#: leading columns of a logprob row: token, its logprob, its rank; then K ids, then K logprobs
HEAD_COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan asks to be returned; known on every rank before the step runs."""

    samples: int  # sampled tokens
    prompt: int  # prompt positions whose logprobs are wanted
    top: int  # K: alternatives per position; -1 when no logprobs are wanted at all

    @property
    def anything(self) -> bool:
        """True when the step returns something."""
        return bool(self.samples or self.prompt)

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the logprob table, None when there is none."""
        return None if self.top < 0 else (self.samples + self.prompt, HEAD_COLUMNS + 2 * self.top)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Host-side values of one completed step."""

    step: int
    tokens: list[int]  # sampled tokens, in the order of the plan's sampled rows
    table: NDArray[np.float64] | None  # [samples + prompt positions, 3 + 2K]


def prompt_rows(plan: StepPlan, tables: DeviceTables) -> NDArray[np.int64]:
    """Indices into the plan's tokens of the prompt positions whose logprobs are wanted, ascending."""
    asked = tables.prompt_logprobs[plan.slots] >= 0
    if not asked.any():
        return np.zeros(0, dtype=np.int64)
    row = np.repeat(np.arange(plan.n_rows), plan.counts)
    offset = np.arange(plan.n_tokens) - np.repeat(np.cumsum(plan.counts) - plan.counts, plan.counts)
    position = plan.starts[row] + offset
    # Position p scores token p + 1; the last prompt position scores the first output token, which is sampled.
    wanted = asked[row] & (position < tables.prompt_len[plan.slots[row]] - 1)
    return np.flatnonzero(wanted)


def wanted(plan: StepPlan, tables: DeviceTables) -> Wanted:
    """Sizes of the result of ``plan``."""
    sampled = plan.slots[plan.samples]
    top = int(tables.logprobs[sampled].max(initial=-1))
    rows = prompt_rows(plan, tables)
    if len(rows):
        top = max(top, int(tables.prompt_logprobs[plan.slots].max()))
    return Wanted(samples=plan.n_samples, prompt=len(rows), top=top)


def pack_logprobs(tokens: torch.Tensor, found: TopLogprobs, top: int) -> torch.Tensor:
    """[n, 3 + 2 * top] float64 rows: token, its logprob and rank, then ids and logprobs of the likeliest (ids are exact in float64)."""
    head = torch.stack([tokens.double(), found.logprob.double(), found.rank.double()], dim=1)
    pad = top - found.top_ids.shape[1]  # narrower where no sampled row asked for as many
    ids = torch.nn.functional.pad(found.top_ids.double(), (0, pad), value=-1.0)
    values = torch.nn.functional.pad(found.top_logprobs.double(), (0, pad), value=float("-inf"))
    return torch.cat([head, ids, values], dim=1)


class HostCopy:
    """A device tensor on its way to the host. On the CPU it is there already; on CUDA an event tells when it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = tensor

    def wait(self) -> torch.Tensor:
        """The tensor on the host, complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
