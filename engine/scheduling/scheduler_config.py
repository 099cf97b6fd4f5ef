"""Settings of the scheduler of one DP rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..offload.tier_limits import TierLimits


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and switches. ValueError names a number out of range."""

    max_num_seqs: int  # requests running at once; rows of the device tables
    max_num_batched_tokens: int  # tokens of one step
    page_size: int  # tokens per KV page
    n_pages: int  # pages of the KV pool
    max_model_len: int  # longest prompt plus output, tokens
    pp: int = 1  # pipeline stages: a request decodes again pp steps later at the earliest
    overlap: bool = True  # results are handled one step later, so that host and device work at once
    prefix_caching: bool = True  # keep pages of finished requests for equal prefixes
    eos_token_ids: tuple[int, ...] = ()  # end tokens of the model
    admission_horizon: int = 16  # growth of those who run that a newcomer must leave room for, tokens (a page at least); 0 for none
    tier: TierLimits | None = None  # with offloading: pools and policy
    seed: int = 0  # seeds requests that bring no seed

    def __post_init__(self) -> None:
        """Check the ranges."""
        least_of = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "page_size", "n_pages", "pp"), 1)
        for name, least in {**least_of, "max_model_len": 2, "admission_horizon": 0}.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, found {value}")

    @property
    def lag(self) -> int:
        """Steps between launching a step and handling its results."""
        return self.pp - 1 + int(self.overlap)
