"""What one step does, as plain arrays: made by the scheduler, sent to every rank of the replica, run by the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

#: columns of ``StepPlan.new_floats``
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
#: columns of ``StepPlan.new_ints``; counts of -1 mean "not asked for"
INT_COLUMNS = ("slot", "length", "prompt_len", "top_k", "seed", "logprobs", "prompt_logprobs")


@cache
def _empty(shape: tuple[int, ...], dtype: type) -> NDArray:  # type: ignore[type-arg]
    """An array without elements; all plans share it."""
    return np.zeros(shape, dtype=dtype)


@dataclass(kw_only=True)
class StepPlan:
    """One step of one DP rank. R rows (scheduled requests), decode rows first, then prefill rows.

    A row computes positions ``starts[r] .. starts[r] + counts[r] - 1`` of the request in ``slots[r]``. Token values
    are read from the device token table, which ``new_tokens`` fills when a request enters a slot and the sampler
    extends. ``pages`` take effect before the step runs.
    """

    step: int  # step number, rising by one
    slots: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [R]
    starts: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [R]
    counts: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [R], at least 1
    samples: NDArray[np.bool_] = field(default_factory=lambda: _empty((0,), np.bool_))  # [R] row ends at its last token: sample the next
    pages: I32 = field(default_factory=lambda: _empty((0, 3), np.int32))  # [P, 3]: slot, index in its page table, logical page
    new_ints: I64 = field(default_factory=lambda: _empty((0, len(INT_COLUMNS)), np.int64))  # [N, INT_COLUMNS] requests entering slots
    new_floats: F64 = field(default_factory=lambda: _empty((0, len(FLOAT_COLUMNS)), np.float64))  # [N, FLOAT_COLUMNS]
    new_tokens: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [sum of length] their host-known tokens
    new_bans: I64 = field(default_factory=lambda: _empty((0, 3), np.int64))  # [B, 3]: slot, length until which it lasts, token id
    new_biases: F64 = field(default_factory=lambda: _empty((0, 3), np.float64))  # [B, 3]: slot, token id, what is added to its logit
    guided: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [G] places among the sampled rows whose token a grammar limits
    masks: I32 = field(default_factory=lambda: _empty((0, 0), np.int32))  # [G, ceil(vocab / 32)] a bit for every token: it may be sampled
    freed_pages: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # pages freed since the last plan; poisoned in debug mode
    # With offloading; all but ``mirrors`` before the step runs, in this order.
    vacated: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # device pages that lost their rows; poisoned in debug mode
    hot_pages: I32 = field(default_factory=lambda: _empty((0, 3), np.int32))  # [H, 3]: slot, index in its lease, device page or -1; empty
    device_pages: I32 = field(default_factory=lambda: _empty((0, 2), np.int32))  # [D, 2]: logical page, device page or -1
    host_pages: I32 = field(default_factory=lambda: _empty((0, 2), np.int32))  # [H, 2]: logical page, host page with its rows or -1
    moving: I32 = field(default_factory=lambda: _empty((0, 2), np.int32))  # [M, 2]: slot, 1: its resident rows go into its hot rows
    restores: I32 = field(default_factory=lambda: _empty((0, 2), np.int32))  # [R, 2]: host page, device page
    seeds: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # slots whose hot rows begin with what their last tokens chose
    mirrors: I32 = field(default_factory=lambda: _empty((0, 2), np.int32))  # [M, 2]: device page, host page; copied after the step
    imports: I32 = field(default_factory=lambda: _empty((0, 2), np.int32))  # [I, 2]: logical page, host page that brings its index keys
    mirrored: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [M]: logical pages of ``mirrors``, where index keys go too
    absent: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # rows of several tokens whose requests miss pages
    offloaded: bool = False  # some request of this replica may have an absent page, or has hot rows
    dp_tokens: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [dp] tokens of this step on every DP rank, agreed
    dp_context: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [dp] graph_key.decode_context of every DP rank, agreed
    dp_offloaded: I32 = field(default_factory=lambda: _empty((0,), np.int32))  # [dp] ``offloaded`` of every DP rank, agreed

    @property
    def n_rows(self) -> int:
        """Scheduled requests."""
        return len(self.slots)

    @property
    def n_tokens(self) -> int:
        """Tokens computed by this step on this DP rank."""
        return int(self.counts.sum())

    @property
    def n_moves(self) -> int:
        """Places of the tier tables that change before the step."""
        return len(self.hot_pages) + len(self.device_pages) + len(self.host_pages) + len(self.moving)

    @property
    def n_samples(self) -> int:
        """Rows that sample a token."""
        return int(self.samples.sum())

    def brief(self) -> str:
        """What runs, in a few words, for people."""
        decodes = int(((self.counts == 1) & self.samples).sum())
        rows = f"{decodes} decode rows, {self.n_rows - decodes} prefill rows of {self.n_tokens - decodes} tokens"
        return f"{rows if self.n_rows else 'no rows'}; tokens of all replicas {self.dp_tokens.tolist()}"
