"""How a token travels: one row of bytes with its values, the slots it goes to, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dispatcher import EPSpec
from .fp8 import BLOCK, dequantise, quantise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIGN = 16  # bytes; rows stay aligned for any field


def payload_bytes(spec: EPSpec) -> int:
    """Bytes of one token's values: ``hidden`` of the payload's dtype, or of e4m3 and one fp32 scale per 128 values."""
    if is_fp8(spec):
        return spec.hidden + 4 * -(-spec.hidden // BLOCK)
    return spec.hidden * float_dtype(spec).itemsize


def is_fp8(spec: EPSpec) -> bool:
    """Whether values travel as e4m3 with scales."""
    return spec.payload in ("fp8", "fp8_ue8m0")


def token_dtype(spec: EPSpec) -> torch.dtype:
    """Dtype of the tokens that are dispatched."""
    return torch.uint8 if spec.payload == "bytes" else DTYPES[spec.dtype]


def float_dtype(spec: EPSpec) -> torch.dtype:
    """Dtype in which values travel when the payload is not FP8."""
    return torch.bfloat16 if spec.payload == "bf16" else token_dtype(spec)


def rounded(spec: EPSpec, x: torch.Tensor) -> torch.Tensor:
    """x [T, hidden] as it would arrive: rounded by the payload, in the spec's dtype."""
    if is_fp8(spec):
        return dequantise(*quantise(x, ue8m0=spec.payload == "fp8_ue8m0"), DTYPES[spec.dtype])
    return x.to(float_dtype(spec)).to(token_dtype(spec))


def _aligned(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Fields of a row: values, [fp8 scales], top_k int32 slots, top_k fp32 weights, int32 origin, zeros.

    The origin of token t of rank r is r * max_tokens + t.
    """

    spec: EPSpec  # widths come from here

    @property
    def _values(self) -> int:
        spec = self.spec
        return _aligned(spec.hidden if is_fp8(spec) else payload_bytes(spec), 4)

    @property
    def _meta(self) -> int:
        scales = -(-self.spec.hidden // BLOCK) if is_fp8(self.spec) else 0
        return self._values + 4 * scales

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return _aligned(self._meta + 8 * self.spec.top_k + 4, _ALIGN)

    def pack(
        self, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, source: int, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, hidden], slots [T, k] (-1 for none), weights [T, k] of rank ``source`` -> uint8 [T, row_bytes].

        ``scales`` [T, ceil(hidden / 128)] come with an x that is e4m3 already.
        """
        spec, meta, k = self.spec, self._meta, self.spec.top_k
        rows = torch.zeros((x.shape[0], self.row_bytes), dtype=torch.uint8, device=x.device)
        if is_fp8(spec):
            values, scales = (x, scales) if scales is not None else quantise(x, ue8m0=spec.payload == "fp8_ue8m0")
            rows[:, : spec.hidden] = values.view(torch.uint8)
            rows[:, self._values : meta].view(torch.float32).copy_(scales)
        else:
            rows[:, : payload_bytes(spec)].view(float_dtype(spec)).copy_(x)
        rows[:, meta : meta + 4 * k].view(torch.int32).copy_(slots)
        rows[:, meta + 4 * k : meta + 8 * k].view(torch.float32).copy_(weights)
        first = source * spec.max_tokens
        origin = torch.arange(first, first + x.shape[0], dtype=torch.int32, device=x.device)
        rows[:, meta + 8 * k : meta + 8 * k + 4].view(torch.int32).copy_(origin.unsqueeze(1))
        return rows

    def empty_rows(self, n: int, device: torch.device) -> torch.Tensor:
        """n rows of no token: zeros, and -1 for every slot."""
        rows = torch.zeros((n, self.row_bytes), dtype=torch.uint8, device=device)
        rows[:, self._meta : self._meta + 4 * self.spec.top_k] = 0xFF
        return rows

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """[M, hidden] in the tokens' dtype; a strided view of the rows when the payload is native."""
        spec, dtype = self.spec, token_dtype(self.spec)
        if is_fp8(spec):
            scales = rows[:, self._values : self._meta].view(torch.float32)
            return dequantise(rows[:, : spec.hidden].view(torch.float8_e4m3fn), scales, dtype)
        return rows[:, : payload_bytes(spec)].view(float_dtype(spec)).to(dtype)

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """[M, k] int64 global slots, -1 for none, ascending with the -1 last."""
        return rows[:, self._meta : self._meta + 4 * self.spec.top_k].view(torch.int32).long()

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """[M, k] float32 weights of the slots."""
        start = self._meta + 4 * self.spec.top_k
        return rows[:, start : start + 4 * self.spec.top_k].view(torch.float32).contiguous()

    def origins(self, rows: torch.Tensor) -> torch.Tensor:
        """[M] int32 origin of each row, see above."""
        start = self._meta + 8 * self.spec.top_k
        return rows[:, start : start + 4].view(torch.int32).flatten()
