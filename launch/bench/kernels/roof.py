"""What this GPU can do, measured in the run it is used in: the bounds that kernels are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .timing import event_us


@dataclass(frozen=True, kw_only=True)
class Roof:
    """Measured ceilings of one GPU."""

    bytes_per_s: float  # device-to-device copy, read and written bytes
    bf16_flops: float  # 8192^3 product through torch
    fp8_flops: float  # the same in e4m3 with one scale a tensor

    def floor_us(self, n_bytes: float, flops: float, unit: str) -> float:
        """Microseconds below which the work cannot be done."""
        rate = {"bf16": self.bf16_flops, "fp8": self.fp8_flops}.get(unit)
        return 1e6 * max(n_bytes / self.bytes_per_s, flops / rate if rate else 0.0)


def measure_roof() -> Roof:
    """Copy of 4 GiB, and 8192^3 products on random values."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = event_us(lambda: target.copy_(source), repeat=10)
    n, flops = 8192, 2.0 * 8192**3
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = event_us(lambda: a @ b, repeat=10)
    one = torch.ones((), device="cuda")
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    narrow = event_us(lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), repeat=10)
    return Roof(bytes_per_s=2e6 * source.nbytes / copy, bf16_flops=1e6 * flops / wide, fp8_flops=1e6 * flops / narrow)
