"""From the last layer's rows to sampled tokens and log-probabilities, on the ranks of the last stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .plan import StepPlan
from .ranges import part
from .results import Wanted, pack_logprobs
from .sampling.guided import Guided
from .sampling.logprobs import gather_logprobs
from .sampling.sample_rows import SampleRows
from .sampling.sampler import RowsOnDevice, SampleResult, sample
from .staging import Array
from .tables import DeviceTables

#: rows of the vocabulary scored at once when a prompt's log-probabilities are wanted
SCORE_ROWS = 512


class Scorer(Protocol):
    """What the head needs of a model."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] of the last layer -> [n, vocab] float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadJob:
    """What the host knows of the n sampled rows of a plan before the step runs."""

    slots: NDArray[np.int32]  # [n] request slots
    last: NDArray[np.int64]  # [n] the plan's token whose logits are sampled
    ends: NDArray[np.int64]  # [n] position of the token to be sampled
    rows: SampleRows  # what sampling does for them
    guided: NDArray[np.int32]  # [G] of the n rows, those whose token a grammar limits
    masks: NDArray[np.int32]  # [G, ceil(vocab / 32)] their masks
    want: Wanted  # what is returned

    @property
    def longest(self) -> int:
        """Tokens of the longest sampled request."""
        return int(self.ends.max())

    def arrays(self, plan: StepPlan) -> dict[str, Array]:
        """What has to be on the device."""
        prompt = self.want.prompt
        return {
            "picked": self.slots.astype(np.int64),
            "last": self.last,
            "ends": self.ends,
            "random": self.rows.random,
            "penalised": self.rows.penalised,
            "prompt_token": prompt.token,
            "prompt_slot": plan.slots[prompt.row].astype(np.int64),
            "prompt_position": prompt.position,
            **self.masked(),
        }

    def masked(self) -> dict[str, Array]:
        """What has to be on the device for rows with a grammar; {} without."""
        return {"guided": self.guided.astype(np.int64), "masks": self.masks} if len(self.guided) else {}


def head_job(plan: StepPlan, want: Wanted, tables: DeviceTables) -> HeadJob:
    """The job of ``plan``."""
    rows = np.flatnonzero(plan.samples)
    slots = plan.slots[rows]
    return HeadJob(
        slots=slots,
        last=np.cumsum(plan.counts, dtype=np.int64)[rows] - 1,
        ends=(plan.starts + plan.counts)[rows].astype(np.int64),
        rows=SampleRows.of(tables.sampling, slots),
        guided=plan.guided,
        masks=plan.masks,
        want=want,
    )


class Head:
    """Samples and scores for one model; writes the token table."""

    def __init__(self, model: Scorer, tables: DeviceTables) -> None:
        self.model = model
        self.tables = tables

    def run(
        self, job: HeadJob, x: torch.Tensor, found: dict[str, torch.Tensor], logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample the rows that end at their last token and score wanted prompt positions.

        Args:
            job: of the step's n sampled rows.
            x: [T, hidden] last layer of the step's tokens.
            found: ``job.arrays`` on the device.
            logits: fp32 [n, vocab] of the sampled rows; None: computed here from ``x``.

        Returns:
            Tokens int64 [n], and the logprob table, float64 of ``Wanted.table_shape``, or None where no log-probabilities are wanted.
        """
        want, device = job.want, x.device
        parts: list[torch.Tensor] = []
        tokens = torch.empty(0, dtype=torch.int64, device=device)
        if len(job.slots):
            logits = self.model.logits(x[found["last"]]) if logits is None else logits
            with part("sampling"):
                result = self._sample(job, logits, found)
            tokens = result.tokens
            if want.top >= 0:
                scores = result.logprobs if result.logprobs is not None else gather_logprobs(logits, tokens, 0)
                parts.append(pack_logprobs(tokens, scores, want.top))
        if len(want.prompt):
            parts.extend(self._score_prompt(want.top, x, found))
        return tokens, torch.cat(parts) if want.top >= 0 else None

    def _sample(self, job: HeadJob, logits: torch.Tensor, found: dict[str, torch.Tensor]) -> SampleResult:
        """Tokens of the sampled rows, which also go to the token table."""
        tables, picked, ends = self.tables, found["picked"], found["ends"]
        rows = RowsOnDevice(found["random"], found["penalised"])
        guided = Guided(found["guided"], found["masks"]) if len(job.guided) else None
        result = sample(
            logits, picked, ends, tables.sampling, tables.tokens, ends,
            host_slots=job.slots, max_length=job.longest, rows=job.rows, device_rows=rows, guided=guided,
        )  # fmt: skip
        tables.tokens[picked, ends] = result.tokens.to(torch.int32)
        return result

    def _score_prompt(self, top: int, x: torch.Tensor, found: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Log-probability rows of prompt tokens, in blocks of positions."""
        where = found["prompt_token"]
        target = self.tables.tokens[found["prompt_slot"], found["prompt_position"]].long()
        parts = []
        for block in range(0, len(target), SCORE_ROWS):
            tokens = target[block : block + SCORE_ROWS]
            logits = self.model.logits(x[where[block : block + SCORE_ROWS]])
            parts.append(pack_logprobs(tokens, gather_logprobs(logits, tokens, top), top))
        return parts
