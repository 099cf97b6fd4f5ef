"""Starting a kernel while the one before it still runs (programmatic dependent launch, sm_90 and later)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter(EARLY: tl.constexpr):
    """First thing in a kernel: wait for what the kernels before wrote, then let the next kernel come in and do the same."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early_start(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that does nothing before ``enter(EARLY)``."""
    on = early(device)
    return {"EARLY": on, "launch_pdl": on}


@lru_cache(maxsize=8)
def early(device: torch.device) -> bool:
    """Whether kernels on this device may start early: their ``EARLY`` and their launch's ``launch_pdl``."""
    return device.type == "cuda" and not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device)[0] >= 9
