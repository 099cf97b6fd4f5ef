"""Where everything lies in the symmetric workspace of one rank: pure arithmetic on the spec.

A workspace is ``depth`` equal channels, one per dispatch that may be in flight. A channel holds, in this order,

- ``flags`` int64 [2, R, 2]: (epoch, tokens) that rank r wrote last, for dispatch (0) and combine (1). Monotone, never cleared;
- ``ids`` int32 [R, M, k] and ``weights`` float32 [R, M, k]: the choices of all tokens of rank r, global slots, -1 for none;
- ``rows`` uint8 [R, M, row_bytes]: row (r, t) is token t of rank r, there if one of its choices is a slot of this rank;
- ``home`` [R, M, hidden] in the combine dtype: row (r, t) is what rank r's experts add to this rank's token t
  (deterministic: [k, M, hidden], row (j, t) is the unweighted output of choice j of token t).

A row's place is its token's number, so no rank counts, numbers or sorts anything before it sends, and the way back needs no
table. R ranks, M ``max_tokens``, k ``top_k``.

A call of which all ranks know that none has more than m tokens may lay its rows closer: ``narrowed(m)`` has m for M in every
pitch, and the regions where they were. That is safe between any two calls of a channel: a region is only written by a call once
everybody is done with the same region of the call before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .dispatcher import EPSpec
from .rows import DTYPES, float_dtype

DISPATCH, COMBINE = 0, 1  # phases, in the order of ``flags``
_LINE = 128  # bytes; regions begin at multiples of it, so that no two share a cache line or a sector
FP8_BLOCK = 128


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Sizes and offsets in bytes. ``of(spec)`` makes it; all ranks have the same."""

    n_ranks: int  # R
    max_tokens: int  # M
    top_k: int  # k
    hidden: int  # values of a token
    slots_per_rank: int  # physical slots of a rank
    depth: int  # channels
    value_bytes: int  # bytes of a row's values; its scales follow
    n_scales: int  # fp32 scales of a row, 0 without FP8
    home_itemsize: int  # bytes of a value on the way back
    home_rows: int  # R, or k in deterministic mode
    room: int  # tokens of a rank that the regions have room for; ``max_tokens`` is less in a narrowed layout
    payload: str  # as in ``EPSpec``; "fp8_ue8m0" has scales that are powers of two
    dtype: str  # of values on the way back, and of x unless the payload is "bytes"

    @classmethod
    def of(cls, spec: EPSpec) -> Wire:
        """The layout that ``spec`` describes."""
        fp8 = spec.payload.startswith("fp8")
        raw = spec.hidden if fp8 or spec.payload == "bytes" else spec.hidden * float_dtype(spec).itemsize
        return cls(
            n_ranks=spec.n_ranks,
            max_tokens=spec.max_tokens,
            top_k=spec.top_k,
            hidden=spec.hidden,
            slots_per_rank=spec.slots_per_rank,
            depth=spec.depth,
            value_bytes=_up(raw, 4),
            n_scales=-(-spec.hidden // FP8_BLOCK) if fp8 else 0,
            home_itemsize=torch.empty((), dtype=DTYPES[spec.dtype]).element_size(),
            home_rows=spec.top_k if spec.deterministic else spec.n_ranks,
            room=spec.max_tokens,
            payload=spec.payload,
            dtype=spec.dtype,
        )

    def narrowed(self, max_tokens: int) -> Wire:
        """The layout of a call in which no rank has more than ``max_tokens``; all ranks give the same number."""
        assert 0 < max_tokens <= self.room, (max_tokens, self.room)
        return replace(self, max_tokens=max_tokens)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        return _up(self.value_bytes + 4 * self.n_scales, 16)

    @property
    def home_pitch(self) -> int:
        """Bytes of a row on the way back, a multiple of 16."""
        return _up(self.hidden * self.home_itemsize, 16)

    @property
    def ids_at(self) -> int:
        """Offset of ``ids`` in a channel; ``flags`` lie at 0."""
        return _up(2 * self.n_ranks * 16, _LINE)

    @property
    def weights_at(self) -> int:
        """Offset of ``weights`` in a channel."""
        return self.ids_at + _up(4 * self.n_ranks * self.room * self.top_k, _LINE)

    @property
    def rows_at(self) -> int:
        """Offset of ``rows`` in a channel."""
        return self.weights_at + _up(4 * self.n_ranks * self.room * self.top_k, _LINE)

    @property
    def home_at(self) -> int:
        """Offset of ``home`` in a channel."""
        return self.rows_at + _up(self.n_ranks * self.room * self.row_bytes, _LINE)

    @property
    def channel_bytes(self) -> int:
        """Bytes of one channel."""
        return self.home_at + _up(self.home_rows * self.room * self.home_pitch, _LINE)

    @property
    def total_bytes(self) -> int:
        """Bytes of a rank's workspace."""
        return self.depth * self.channel_bytes


def workspace_bytes(spec: EPSpec) -> int:
    """Bytes of symmetric memory that a dispatcher of ``spec`` takes on every rank; exactly what is allocated."""
    return Wire.of(spec).total_bytes
