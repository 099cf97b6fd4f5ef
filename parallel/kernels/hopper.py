"""What kernels for Hopper need on the host: TMA descriptors, and whether the device has TMA.

Descriptors are kept by address and shape, because making one costs more than the rest of a launch; they do not keep the
memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class _Layout(NVMMASharedLayout):
    """A shared-memory layout that does not write its name anew at every launch."""

    def __repr__(self) -> str:
        return _name(self.swizzle_byte_width, self.element_bitwidth, self.rank)


@lru_cache(maxsize=16)
def _name(swizzle: int, bits: int, rank: int) -> str:
    return repr(NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank))


@dataclass(frozen=True)
class _Place:
    """Address and type of a tensor, without the tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@lru_cache(maxsize=8192)
def _matrix(address: int, dtype: torch.dtype, shape: tuple[int, int], stride: int, box: tuple[int, int]) -> TensorDescriptor:
    layout = _Layout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=2)
    return TensorDescriptor(_Place(address, dtype), list(shape), [stride, 1], list(box), layout)


@lru_cache(maxsize=8192)
def _line(address: int, dtype: torch.dtype, length: int, box: int) -> TensorDescriptor:
    layout = _Layout(swizzle_byte_width=0, element_bitwidth=dtype.itemsize * 8, rank=1)
    return TensorDescriptor(_Place(address, dtype), [length], [1], [box], layout)


def matrix(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of a matrix in boxes of ``rows`` x ``columns``, laid out as wgmma reads them; what lies outside reads as 0."""
    return _matrix(x.data_ptr(), x.dtype, (x.shape[0], x.shape[1]), x.stride(0), (rows, columns))


def line(x: torch.Tensor, length: int, box: int) -> TensorDescriptor:
    """Descriptor of ``length`` values from the first of ``x`` on, in boxes of ``box`` (128 bytes or more)."""
    return _line(x.data_ptr(), x.dtype, length, box)


def addressable(x: torch.Tensor) -> bool:
    """Whether TMA can address a matrix: its rows start on 16 bytes."""
    return (x.data_ptr() | (x.stride(0) * x.element_size())) % 16 == 0


@lru_cache(maxsize=16)
def has_tma(device: torch.device) -> bool:
    """Whether these kernels run there: compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
