"""Headers of safetensors files: where each tensor lies, checked against the file before anything is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...parallel.json_text import parse_json

#: safetensors dtype names that torch has
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a safetensors file."""

    name: str  # Hugging Face tensor name
    file: Path  # the file that holds it
    dtype: torch.dtype  # stored dtype
    shape: tuple[int, ...]  # stored shape
    start: int  # offset of the first byte in the file
    size: int  # bytes


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that refuses to hold a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice!r} is in the header twice")
    return found


def _read_raw(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header object, the offset of the data, and the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise ValueError(f"header is cut off (the file has {size} bytes, the header needs {8 + length}); download it again")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    try:
        raw = parse_json(text, object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"header is not valid JSON ({error}); the file is damaged or not a safetensors file") from error
    if not isinstance(raw, dict):
        raise ValueError("header is not a JSON object; the file is damaged or not a safetensors file")
    return raw, 8 + length, size


def _entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"header entry of tensor {name!r} is not valid: {entry!r}") from error
    need = math.prod(shape) * dtype.itemsize
    if begin < 0 or end - begin != need:
        what = f"tensor {name!r} of shape {list(shape)} and dtype {entry['dtype']}"
        raise ValueError(f"{what} needs {need} bytes, the header gives it {end - begin}")
    return TensorInfo(name=name, file=path, dtype=dtype, shape=shape, start=data_start + begin, size=need)


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        ValueError: the file is missing, cut off or damaged; the message names the file and the reason.
    """
    try:
        raw, data_start, size = _read_raw(path)
        tensors = [_entry(path, name, entry, data_start) for name, entry in raw.items() if name != "__metadata__"]
        needed = max((t.start + t.size for t in tensors), default=data_start)
        if needed > size:
            raise ValueError(f"is cut off: it has {size} bytes, its tensors need {needed}; download it again")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return sorted(tensors, key=lambda t: t.start)
