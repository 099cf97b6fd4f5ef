"""Which rows of a batch need more than their highest logit, as the host knows it before the step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampler_table import SamplerTable


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRows:
    """What sampling does for n rows."""

    random: NDArray[np.int64]  # rows that draw, ascending
    penalised: NDArray[np.int64]  # rows with penalties, ascending
    banned: bool  # some row has ids that may not be sampled
    logprobs: int  # alternatives of the widest row; -1 when no row wants log-probabilities
    biased: bool = False  # some row has a ``logit_bias``

    @property
    def plain(self) -> bool:
        """Every row takes its highest logit, and nothing else is asked for."""
        return not (len(self.random) or len(self.penalised) or self.banned or self.biased) and self.logprobs < 0

    @classmethod
    def of(cls, table: SamplerTable, slots: NDArray[Any]) -> SampleRows:
        """What the requests in ``slots`` [n] need."""
        return cls(
            random=np.flatnonzero(~table.host_greedy[slots]),
            penalised=np.flatnonzero(table.host_penalised[slots]),
            banned=bool(table.host_banned[slots].any()),
            biased=bool(table.bias.host[slots].any()),
            logprobs=int(table.host_logprobs[slots].max(initial=-1)),
        )
