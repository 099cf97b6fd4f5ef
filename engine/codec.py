"""Named arrays as bytes: how step plans travel between ranks. A msgpack header, then the raw values; nothing is unpickled."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .plan import StepPlan

_LENGTH = struct.Struct("<I")
_SCALARS = ("step", "offloaded")
_DTYPES = {name: np.dtype(name) for name in ("int32", "int64", "float32", "float64", "bool")}


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """What follows it: integers by name, and (name, dtype, shape) of every array."""

    scalars: dict[str, int]
    arrays: list[tuple[str, str, tuple[int, ...]]]


_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(_Header)


def encode_arrays(arrays: Mapping[str, NDArray[Any]], scalars: Mapping[str, int]) -> bytes:
    """Pack arrays, of the dtypes that ``decode_arrays`` knows, and integer scalars into one byte string that it reads back."""
    text = _encoder.encode(_Header(dict(scalars), [(name, a.dtype.name, a.shape) for name, a in arrays.items()]))
    return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(a).tobytes() for a in arrays.values())])


def decode_arrays(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """Inverse of ``encode_arrays``.

    Raises:
        ValueError: a header that is none or of unknown dtype, or a length that does not match.
    """
    if len(data) < _LENGTH.size:
        raise ValueError(f"message has {len(data)} bytes, less than the {_LENGTH.size} that say how long its header is")
    (length,) = _LENGTH.unpack_from(data)
    head = _header.decode(data[_LENGTH.size : _LENGTH.size + length])
    at = _LENGTH.size + length
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype_name, shape in head.arrays:
        if dtype_name not in _DTYPES:
            raise ValueError(f"array {name!r} has unknown dtype {dtype_name!r}; known: {sorted(_DTYPES)}")
        dtype = _DTYPES[dtype_name]
        count = int(np.prod(shape, dtype=np.int64))
        if at + count * dtype.itemsize > len(data):
            raise ValueError(f"array {name!r} of shape {shape} ends after the {len(data)} bytes that arrived")
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError(f"message has {len(data)} bytes, its header describes {at}")
    return arrays, head.scalars


def encode_plan(plan: StepPlan) -> bytes:
    """A step plan as bytes."""
    arrays = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _SCALARS}
    sent = {name: a for name, a in arrays.items() if len(a)}  # a plan is mostly empty
    return encode_arrays(sent, {"step": plan.step, "offloaded": int(plan.offloaded)})


def decode_plan(data: bytes) -> StepPlan:
    """Inverse of ``encode_plan``; the arrays may not be written to.

    Raises:
        ValueError: as ``decode_arrays``.
    """
    arrays, scalars = decode_arrays(data)
    return StepPlan(step=scalars["step"], offloaded=bool(scalars["offloaded"]), **arrays)
