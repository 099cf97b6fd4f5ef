"""Host rows for tests: random bytes, in memory that a GPU can read where there is one."""

from __future__ import annotations

import ctypes

import torch

_HUGE = 2 << 20


class Rows:
    """One layer's part of a host pool, poisoned: every byte is 0xFF until a test writes it."""

    def __init__(self, n_rows: int, row_bytes: int, pitch: int | None = None, *, fill: bool = True) -> None:
        self.n_rows, self.row_bytes, self.pitch = n_rows, row_bytes, pitch or row_bytes
        n_bytes = n_rows * self.pitch
        if torch.cuda.is_available():
            self._memory = _registered(n_bytes)
        else:
            self._memory = torch.empty(n_bytes, dtype=torch.uint8)
        self.bytes = self._memory.view(n_rows, self.pitch)
        if fill:
            self.bytes.fill_(0xFF)

    def data_ptr(self) -> int:
        return self.bytes.data_ptr()

    def noise(self, seed: int) -> Rows:
        """Random bytes in every row; the gaps stay poisoned."""
        self.bytes[:, : self.row_bytes] = noise(self.n_rows, self.row_bytes, seed)
        return self


def noise(n_rows: int, row_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (n_rows, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class _Pages:
    """Anonymous memory in huge pages, known to the device; given back with the object."""

    def __init__(self, n_bytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._unmap, self._size = libc.munmap, n_bytes + _HUGE
        self._start = libc.mmap(None, self._size, 3, 0x22, -1, 0)  # read and write; private, anonymous
        assert self._start != ctypes.c_void_p(-1).value
        self.at = -(-self._start // _HUGE) * _HUGE
        libc.madvise(self._start, self._size, 14)  # huge pages
        error = torch.cuda.cudart().cudaHostRegister(self.at, n_bytes, 0)
        assert int(error) == 0, error
        self._device = torch.cuda.cudart()

    def __del__(self) -> None:
        self._device.cudaHostUnregister(self.at)
        self._unmap(self._start, self._size)


_KEPT: dict[int, _Pages] = {}


def _registered(n_bytes: int) -> torch.Tensor:
    pages = _Pages(n_bytes)
    tensor = torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(pages.at), dtype=torch.uint8)
    _KEPT[pages.at] = pages
    return tensor


def release() -> None:
    """Give back the memory of all rows made so far; their tensors are dead."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _KEPT.clear()
