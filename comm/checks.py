"""What a dispatcher refuses, in words."""

from __future__ import annotations

import zlib
from dataclasses import asdict

import torch

from ..parallel.debug import debugging
from ..parallel.group import Group
from .dispatcher import EPSpec
from .rows import DTYPES

PAYLOADS = ("native", "bf16", "fp8")


def check_spec(spec: EPSpec, group_size: int) -> None:
    """Raise ValueError for a spec that no group of ``group_size`` ranks can serve."""
    if spec.n_ranks != group_size:
        raise ValueError(f"EPSpec.n_ranks is {spec.n_ranks}, but the expert group has {group_size} ranks")
    for name in ("n_slots", "hidden", "top_k", "max_tokens"):
        if getattr(spec, name) < 1:
            raise ValueError(f"EPSpec.{name} must be at least 1, found {getattr(spec, name)}")
    if spec.n_slots % spec.n_ranks:
        valid = [n for n in range(1, spec.n_slots + 1) if spec.n_slots % n == 0]
        raise ValueError(f"{spec.n_slots} expert slots do not divide over {spec.n_ranks} ranks; valid numbers of ranks: {valid[:16]}")
    if spec.payload not in PAYLOADS:
        raise ValueError(f"EPSpec.payload must be one of {', '.join(PAYLOADS)}, found {spec.payload!r}")
    if spec.dtype not in DTYPES:
        raise ValueError(f"EPSpec.dtype must be one of {', '.join(DTYPES)}, found {spec.dtype!r}")


def check_agreement(spec: EPSpec, backend: str, group: Group) -> None:
    """Collective: raise ValueError on every rank if specs or backends differ, naming fields, values and ranks."""
    fields = {**asdict(spec), "backend": backend}
    marks = [int(v) if isinstance(v, (int, bool)) else zlib.crc32(v.encode()) for v in fields.values()]
    table = group.gather_ints(marks)
    for column, (name, mine) in enumerate(fields.items()):
        if (table[:, column] == table[0, column]).all():
            continue
        if isinstance(mine, (int, bool)):
            found = ", ".join(f"{value} on rank {rank}" for rank, value in zip(group.ranks, table[:, column].tolist(), strict=True))
        else:
            odd = [rank for rank, value in zip(group.ranks, table[:, column], strict=True) if value != marks[column]]
            found = f"{mine!r} on rank {group.ranks[group.index]}, something else on ranks {odd}"
        raise ValueError(f"the ranks of the expert group disagree on {name}: {found}")


def check_call(spec: EPSpec, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ValueError, before anything is sent, for tensors that do not fit the spec.

    Slot ids are looked at only with RORQUAL_DEBUG set: that costs a sync on CUDA.
    """
    if x.dim() != 2 or x.shape[1] != spec.hidden:
        raise ValueError(f"dispatch: x must be [T, {spec.hidden}], found {list(x.shape)}")
    if x.dtype != DTYPES[spec.dtype]:
        raise ValueError(f"dispatch: x must be {spec.dtype}, found {str(x.dtype).removeprefix('torch.')}")
    if x.shape[0] > spec.max_tokens:
        raise ValueError(f"dispatch: {x.shape[0]} tokens, but the dispatcher was made for at most {spec.max_tokens} (max_tokens)")
    for name, tensor in (("slot_ids", slot_ids), ("weights", weights)):
        if tuple(tensor.shape) != (x.shape[0], spec.top_k):
            raise ValueError(f"dispatch: {name} must be [{x.shape[0]}, {spec.top_k}], found {list(tensor.shape)}")
    if slot_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"dispatch: slot_ids must be int32 or int64, found {str(slot_ids.dtype).removeprefix('torch.')}")
    if debugging() and slot_ids.numel():
        low, high = int(slot_ids.min()), int(slot_ids.max())
        if low < -1 or high >= spec.n_slots:
            raise ValueError(f"dispatch: slot ids must be -1 or 0..{spec.n_slots - 1}, found {low}..{high}")


def check_outputs(spec: EPSpec, y: torch.Tensor, expected_rows: int) -> None:
    """Raise ValueError for expert outputs that do not match the rows they were computed from."""
    if tuple(y.shape) != (expected_rows, spec.hidden):
        raise ValueError(f"combine: y must be [{expected_rows}, {spec.hidden}], found {list(y.shape)}")
