"""Typed views of one channel of a rank's symmetric workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .heap.peers import Peers
from .rows import DTYPES
from .wire import Wire

VALUE_DTYPES = {"bf16": torch.bfloat16, "bytes": torch.uint8, "fp8": torch.float8_e4m3fn, "fp8_ue8m0": torch.float8_e4m3fn}


def value_dtype(wire: Wire) -> torch.dtype:
    """Dtype of the values of a row."""
    return VALUE_DTYPES.get(wire.payload) or DTYPES[wire.dtype]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The regions of ``wire``, as tensors over the workspace."""

    flags: torch.Tensor  # int64 [2, R, 2]
    ids: torch.Tensor  # int32 [R, M, k]
    weights: torch.Tensor  # float32 [R, M, k]
    rows: torch.Tensor  # uint8 [R, M, row_bytes]
    home: torch.Tensor  # [home_rows, M, hidden], strided
    values: torch.Tensor  # [R * M, hidden] of the rows as they travel, strided
    scales: torch.Tensor | None  # float32 [R * M, n_scales], strided

    @classmethod
    def of(cls, wire: Wire, workspace: torch.Tensor, channel: int) -> Blocks:
        """Views of ``channel`` in ``workspace`` uint8 [>= total_bytes]."""
        start, r, m, k = channel * wire.channel_bytes, wire.n_ranks, wire.max_tokens, wire.top_k

        def region(at: int, n: int) -> torch.Tensor:
            return workspace[start + at : start + at + n]

        rows = region(wire.rows_at, r * m * wire.row_bytes).view(r * m, wire.row_bytes)
        home = region(wire.home_at, wire.home_rows * m * wire.home_pitch).view(wire.home_rows, m, wire.home_pitch)
        dtype = value_dtype(wire)
        at = wire.value_bytes
        return cls(
            flags=region(0, 2 * r * 16).view(torch.int64).view(2, r, 2),
            ids=region(wire.ids_at, 4 * r * m * k).view(torch.int32).view(r, m, k),
            weights=region(wire.weights_at, 4 * r * m * k).view(torch.float32).view(r, m, k),
            rows=rows.view(r, m, wire.row_bytes),
            home=home[:, :, : wire.hidden * wire.home_itemsize].view(DTYPES[wire.dtype]),
            values=rows[:, : wire.hidden * dtype.itemsize].view(dtype),
            scales=rows[:, at : at + 4 * wire.n_scales].view(torch.float32) if wire.n_scales else None,
        )


def blocks_at(wire: Wire, peers: Peers, peer: int, channel: int) -> Blocks:
    """The regions of ``channel`` at rank ``peer``; made once for each pitch.

    Raises:
        RuntimeError: its workspace cannot be mapped here.
    """
    key = (peer, channel, wire.max_tokens)
    found = peers.cut.get(key)
    if found is None:
        view = peers.views[peer]
        if view is None:
            raise RuntimeError(f"the workspace of rank {peer} cannot be mapped here; plain stores cannot reach it")
        found = peers.cut[key] = Blocks.of(wire, view, channel)
    blocks: Blocks = found
    return blocks
