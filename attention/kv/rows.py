"""Storage of cached rows: plain floats, FP8 latent rows, and page-planar FP8 or FP4 index keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from . import fp4
from .layout import decode_latent, encode_latent, fp8_latent_bytes, quantise

_NAN_BYTE = 0xFF  # e4m3, bf16 and fp32 values made of this byte are all NaN


class RowStore(Protocol):
    """Rows addressed by flat row number ``page * page_size + offset``."""

    n_bytes: int  # memory of the whole store

    @property
    def pool(self) -> torch.Tensor:
        """The memory as kernels take it: rows [n_rows, bytes or width], or pages [n_pages, bytes] of FP8 or FP4 index keys."""

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``values`` [T, width] at ``rows`` [T] int64."""

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [...] int64 -> values [..., width] in the store's reading dtype."""

    def poison(self, pages: torch.Tensor) -> None:
        """Fill ``pages`` [n] int64 with NaN."""


class LatentStore(RowStore, Protocol):
    """A row store whose rows are moved as bytes and may be read from elsewhere."""

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, bytes of a row], a view of the memory."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of rows, uint8 [N, bytes of a row] -> their values [N, width] in the store's reading dtype."""


class FloatRows:
    """Rows of fp32 or bf16 values."""

    def __init__(self, n_pages: int, page_size: int, width: int, dtype: torch.dtype, read_dtype: torch.dtype, device: torch.device) -> None:
        self.pages = torch.zeros(n_pages, page_size, width, dtype=dtype, device=device)
        self.rows = self.pages.view(-1, width)
        self.read_dtype = read_dtype
        self.n_bytes = self.pages.nbytes

    @property
    def pool(self) -> torch.Tensor:
        """[n_rows, width]."""
        return self.rows

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``values`` [T, width] at ``rows`` [T] int64."""
        self.rows.index_copy_(0, rows, values.to(self.rows.dtype))

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [...] int64 -> values [..., width]."""
        return self.rows.index_select(0, rows.reshape(-1)).to(self.read_dtype).view(*rows.shape, self.rows.shape[1])

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, bytes of a row]."""
        return self.rows.view(torch.uint8)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of rows, uint8 [N, bytes of a row] -> values [N, width]."""
        return rows.view(self.rows.dtype).to(self.read_dtype)

    def poison(self, pages: torch.Tensor) -> None:
        """Fill ``pages`` [n] int64 with NaN."""
        self.pages.index_fill_(0, pages, float("nan"))


class Fp8LatentRows:
    """Latent rows of e4m3 values, fp32 scales per 128, and a bf16 RoPE key; a token's bytes are contiguous."""

    def __init__(self, n_pages: int, page_size: int, latent: int, rope: int, read_dtype: torch.dtype, device: torch.device) -> None:
        self.latent = latent
        self.pages = torch.zeros(n_pages, page_size, fp8_latent_bytes(latent, rope), dtype=torch.uint8, device=device)
        self.rows = self.pages.view(n_pages * page_size, -1)
        self.read_dtype = read_dtype
        self.n_bytes = self.pages.nbytes

    @property
    def pool(self) -> torch.Tensor:
        """uint8 [n_rows, bytes of a row]."""
        return self.rows

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise ``values`` [T, latent + rope] into ``rows`` [T] int64."""
        self.rows.index_copy_(0, rows, encode_latent(values, self.latent))

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [...] int64 -> dequantised values [..., latent + rope]."""
        values = self.decode(self.rows.index_select(0, rows.reshape(-1)))
        return values.view(*rows.shape, values.shape[1])

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, bytes of a row]."""
        return self.rows

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of rows, uint8 [N, bytes of a row] -> dequantised values [N, latent + rope]."""
        return decode_latent(rows, self.latent).to(self.read_dtype)

    def poison(self, pages: torch.Tensor) -> None:
        """Fill ``pages`` [n] int64 with NaN."""
        self.pages.index_fill_(0, pages, _NAN_BYTE)


class Fp8IndexRows:
    """Index keys of e4m3 values with one fp32 scale each; in a page all the values come first, then all the scales."""

    def __init__(self, n_pages: int, page_size: int, width: int, read_dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.pages = torch.zeros(n_pages, page_size * (width + 4), dtype=torch.uint8, device=device)
        self.codes = self.pages[:, : page_size * width].view(n_pages, page_size, width)
        self.scales = self.pages[:, page_size * width :].view(torch.float32)
        self.read_dtype = read_dtype
        self.n_bytes = self.pages.nbytes

    @property
    def pool(self) -> torch.Tensor:
        """uint8 [n_pages, bytes of a page]."""
        return self.pages

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise ``values`` [T, width] into ``rows`` [T] int64."""
        codes, scales = quantise(values, values.shape[1])
        page, offset = rows // self.page_size, rows % self.page_size
        self.codes[page, offset] = codes
        self.scales[page, offset] = scales[:, 0]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [...] int64 -> dequantised values [..., width]."""
        page, offset = rows // self.page_size, rows % self.page_size
        wide = self.codes[page, offset].view(torch.float8_e4m3fn).float()
        return (wide * self.scales[page, offset].unsqueeze(-1)).to(self.read_dtype)

    def poison(self, pages: torch.Tensor) -> None:
        """Fill ``pages`` [n] int64 with NaN."""
        self.pages.index_fill_(0, pages, _NAN_BYTE)


class Fp4IndexRows:
    """Index keys of e2m1 values with a word of scales each (``kv/fp4.py``); in a page all the values come first, then all the words."""

    def __init__(self, n_pages: int, page_size: int, width: int, read_dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.pages = torch.zeros(n_pages, page_size * fp4.key_bytes(width), dtype=torch.uint8, device=device)
        self.codes = self.pages[:, : page_size * width // 2].view(n_pages, page_size, width // 2)
        self.words = self.pages[:, page_size * width // 2 :].view(torch.int32)
        self.read_dtype = read_dtype
        self.n_bytes = self.pages.nbytes

    @property
    def pool(self) -> torch.Tensor:
        """uint8 [n_pages, bytes of a page]."""
        return self.pages

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise ``values`` [T, width] into ``rows`` [T] int64."""
        page, offset = rows // self.page_size, rows % self.page_size
        self.codes[page, offset], self.words[page, offset] = fp4.quantise(values)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [...] int64 -> dequantised values [..., width]."""
        page, offset = (part.reshape(-1) for part in (rows // self.page_size, rows % self.page_size))
        values, scales = fp4.decode(self.codes[page, offset], self.words[page, offset])
        return (values * scales[:, None]).to(self.read_dtype).view(*rows.shape, values.shape[1])

    def poison(self, pages: torch.Tensor) -> None:
        """Fill ``pages`` [n] int64 with NaN: all scales are."""
        self.pages.index_fill_(0, pages, _NAN_BYTE)


def page_ids(pages: Sequence[int] | np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page numbers as int64 on ``device``."""
    if isinstance(pages, np.ndarray):
        pages = torch.from_numpy(pages.astype(np.int64))
    return torch.as_tensor(pages, dtype=torch.int64, device=device).reshape(-1)
