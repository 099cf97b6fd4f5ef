"""What a dispatcher refuses, in words."""

from __future__ import annotations

import zlib
from dataclasses import asdict

import torch

from ..parallel.debug import debugging
from ..parallel.group import Group
from .caps import Caps
from .dispatcher import EPSpec
from .fp8 import BLOCK
from .routed import LAYOUTS
from .rows import DTYPES, is_fp8, token_dtype

#: how x travels: as it is; rounded to bf16; e4m3 with one fp32 scale per 128 values, any or a power of two; uint8, not looked at
PAYLOADS = ("native", "bf16", "fp8", "fp8_ue8m0", "bytes")


def check_spec(spec: EPSpec, group_size: int) -> None:
    """Raise ValueError for a spec that no group of ``group_size`` ranks can serve."""
    if spec.n_ranks != group_size:
        raise ValueError(f"EPSpec.n_ranks is {spec.n_ranks}, but the expert group has {group_size} ranks")
    for name in ("n_slots", "hidden", "top_k", "max_tokens", "depth", "timeout_ms", "max_sms"):
        if getattr(spec, name) < 1:
            raise ValueError(f"EPSpec.{name} must be at least 1, found {getattr(spec, name)}")
    if spec.n_slots % spec.n_ranks:
        valid = [n for n in range(1, spec.n_slots + 1) if spec.n_slots % n == 0]
        raise ValueError(f"{spec.n_slots} expert slots do not divide over {spec.n_ranks} ranks; valid numbers of ranks: {valid[:16]}")
    if spec.payload not in PAYLOADS:
        raise ValueError(f"EPSpec.payload must be one of {', '.join(PAYLOADS)}, found {spec.payload!r}")
    if spec.dtype not in DTYPES:
        raise ValueError(f"EPSpec.dtype must be one of {', '.join(DTYPES)}, found {spec.dtype!r}")
    if spec.alignment not in (1, 128):
        raise ValueError(f"EPSpec.alignment must be 1 or 128, found {spec.alignment}")


def check_caps(spec: EPSpec, backend: str, caps: Caps) -> None:
    """Raise ValueError for what the spec asks and ``backend`` has not."""
    if spec.fault_tolerant and not caps.fault_mask and spec.n_ranks == 1:
        raise ValueError(f"the {backend} backend cannot go on without a rank (fault_tolerant): all experts are on this one; leave it out")
    if spec.fault_tolerant and not caps.fault_mask:
        raise ValueError(f"the {backend} backend cannot go on without a rank (fault_tolerant); symm, nvshmem and shm can")
    if spec.deterministic and not caps.deterministic:
        raise ValueError(f"the {backend} backend has no deterministic sums; torch, torch_static, symm, nvshmem and shm have")
    if caps.max_top_k is not None and spec.top_k > caps.max_top_k:
        raise ValueError(
            f"the {backend} backend takes at most {caps.max_top_k} choices of a token, found top_k {spec.top_k}; torch takes any"
        )
    if caps.max_ranks is not None and spec.n_ranks > caps.max_ranks:
        raise ValueError(f"the {backend} backend takes at most {caps.max_ranks} ranks, found {spec.n_ranks}; torch takes any number")
    if spec.fault_tolerant and spec.deterministic:
        why = "a place of the deterministic way back has several writers, and a rank that was given up may write late"
        raise ValueError(f"fault_tolerant and deterministic exclude each other: {why}; choose one")


def check_not_capturing(device: torch.device | None) -> None:
    """Raise RuntimeError inside a CUDA graph capture: memory that ranks share is made before."""
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a dispatcher cannot be made inside a CUDA graph capture; make it before, and capture its calls")


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


def check_call(
    spec: EPSpec,
    x: torch.Tensor,
    slot_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: int | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Raise ValueError, before anything is sent, for tensors that do not fit the spec.

    ``limit`` is the most tokens of this call, if it is less than the spec's. Slot ids are looked at only with RORQUAL_DEBUG set:
    that costs a sync on CUDA.
    """
    if x.dim() != 2 or x.shape[1] != spec.hidden:
        raise ValueError(f"dispatch: x must be [T, {spec.hidden}], found {list(x.shape)}")
    _check_values(spec, x, scales)
    if x.shape[0] > spec.max_tokens:
        raise ValueError(f"dispatch: {x.shape[0]} tokens, but the dispatcher was made for at most {spec.max_tokens} (max_tokens)")
    if limit is not None and not x.shape[0] <= limit <= spec.max_tokens:
        raise ValueError(f"dispatch: capacity must be between the {x.shape[0]} tokens of x and max_tokens {spec.max_tokens}, found {limit}")
    for name, tensor in (("slot_ids", slot_ids), ("weights", weights)):
        if tuple(tensor.shape) != (x.shape[0], spec.top_k):
            raise ValueError(f"dispatch: {name} must be [{x.shape[0]}, {spec.top_k}], found {list(tensor.shape)}")
    if slot_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"dispatch: slot_ids must be int32 or int64, found {_name(slot_ids)}")
    captured = slot_ids.is_cuda and torch.cuda.is_current_stream_capturing()  # values cannot be read there; eager calls are looked at
    if debugging() and slot_ids.numel() and not captured:
        low, high = int(slot_ids.min()), int(slot_ids.max())
        if low < -1 or high >= spec.n_slots:
            raise ValueError(f"dispatch: slot ids must be -1 or 0..{spec.n_slots - 1}, found {low}..{high}")


def _check_values(spec: EPSpec, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is None:
        if x.dtype != token_dtype(spec):
            raise ValueError(f"dispatch: x must be {str(token_dtype(spec)).removeprefix('torch.')}, found {_name(x)}")
        return
    if not is_fp8(spec):
        raise ValueError(f"dispatch: scales belong to FP8 payloads, but the dispatcher was made for payload {spec.payload!r}")
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"dispatch: with scales, x must be float8_e4m3fn, found {_name(x)}")
    want = [x.shape[0], -(-spec.hidden // BLOCK)]
    if list(scales.shape) != want or scales.dtype != torch.float32:
        raise ValueError(f"dispatch: scales must be float32 {want}, found {_name(scales)} {list(scales.shape)}")


def check_valid(n_valid: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise ValueError unless ``n_valid`` is None or int32 [1] on x's device."""
    if n_valid is not None and (n_valid.dtype != torch.int32 or n_valid.numel() != 1 or n_valid.device != x.device):
        found = f"{_name(n_valid)} {list(n_valid.shape)} on {n_valid.device}"
        raise ValueError(f"dispatch: n_valid must be int32 [1] on {x.device}, found {found}")


def check_layout(layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"dispatch: layout must be one of {', '.join(LAYOUTS)}, found {layout!r}")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_outputs(spec: EPSpec, y: torch.Tensor, expected_rows: int | tuple[int, ...]) -> None:
    """Raise ValueError for expert outputs that do not match the rows they were computed from."""
    lead = (expected_rows,) if isinstance(expected_rows, int) else expected_rows
    if tuple(y.shape) != (*lead, spec.hidden):
        raise ValueError(f"combine: y must be {[*lead, spec.hidden]}, found {list(y.shape)}")
