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


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptRows:
    """The M prompt tokens of a step that are scored: each by the logits of the position before it."""

    token: NDArray[np.int64]  # [M] index into the plan's tokens of the position before, ascending
    row: NDArray[np.int64]  # [M] plan row
    position: NDArray[np.int64]  # [M] position of the scored token in its request

    def __len__(self) -> int:
        return len(self.token)


_NONE = np.zeros(0, dtype=np.int64)
NO_PROMPT_ROWS = PromptRows(token=_NONE, row=_NONE, position=_NONE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """What a plan asks to be returned; known on every rank before the step runs."""

    samples: int  # sampled tokens
    prompt: PromptRows  # prompt tokens whose logprobs are wanted
    top: int  # K: alternatives per position; -1 when no logprobs are wanted at all

    @property
    def anything(self) -> bool:
        """True when the step returns something."""
        return bool(self.samples or len(self.prompt))

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the logprob table, None when there is none."""
        return None if self.top < 0 else (self.samples + len(self.prompt), HEAD_COLUMNS + 2 * self.top)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Host-side values of one completed step."""

    step: int
    tokens: list[int]  # sampled tokens, in the order of the plan's sampled rows
    table: NDArray[np.float64] | None  # [samples + prompt positions, 3 + 2K]


def prompt_rows(plan: StepPlan, tables: DeviceTables) -> PromptRows:
    """The prompt tokens whose logprobs ``plan`` is to give."""
    asked = tables.sampling.host_prompt_logprobs[plan.slots] >= 0
    if not asked.any():
        return NO_PROMPT_ROWS
    row = np.repeat(np.arange(plan.n_rows), plan.counts)
    offset = np.arange(plan.n_tokens) - np.repeat(np.cumsum(plan.counts) - plan.counts, plan.counts)
    scored = plan.starts[row].astype(np.int64) + offset + 1
    # The token after the prompt's last one is the first output token, which is sampled.
    token = np.flatnonzero(asked[row] & (scored < tables.prompt_len[plan.slots[row]]))
    return PromptRows(token=token, row=row[token], position=scored[token])


def wanted(plan: StepPlan, tables: DeviceTables) -> Wanted:
    """Sizes of the result of ``plan``."""
    sampled = plan.slots[plan.samples]
    top = int(tables.sampling.host_logprobs[sampled].max(initial=-1))
    prompt = prompt_rows(plan, tables)
    if len(prompt):
        top = max(top, int(tables.sampling.host_prompt_logprobs[plan.slots].max()))
    return Wanted(samples=plan.n_samples, prompt=prompt, top=top)


def pack_logprobs(tokens: torch.Tensor, found: TopLogprobs, top: int) -> torch.Tensor:
    """[n, 3 + 2 * top] float64 rows: token, its logprob and rank, then ids and logprobs of the likeliest (ids are exact in float64)."""
    head = torch.stack([tokens.double(), found.logprob.double(), found.rank.double()], dim=1)
    pad = top - found.top_ids.shape[1]  # narrower where no sampled row asked for as many
    ids = torch.nn.functional.pad(found.top_ids.double(), (0, pad), value=-1.0)
    values = torch.nn.functional.pad(found.top_logprobs.double(), (0, pad), value=float("-inf"))
    return torch.cat([head, ids, values], dim=1)
