"""How large a workspace may be, and what would fit."""

from __future__ import annotations

from dataclasses import replace

from .dispatcher import EPSpec
from .wire import workspace_bytes


def largest_max_tokens(spec: EPSpec, limit_bytes: int) -> int:
    """The largest ``max_tokens`` whose workspace has at most ``limit_bytes``; 0 if not even one token fits."""
    low, high = 0, 1
    while workspace_bytes(replace(spec, max_tokens=high)) <= limit_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if workspace_bytes(replace(spec, max_tokens=middle)) <= limit_bytes else (low, middle)
    return low


def check_room(spec: EPSpec, limit_bytes: int, backend: str) -> None:
    """Raise ValueError, with the largest ``max_tokens`` that fits, for a spec whose workspace is larger than ``limit_bytes``."""
    need = workspace_bytes(spec)
    if need <= limit_bytes:
        return
    most = largest_max_tokens(spec, limit_bytes)
    what = f"max_tokens {spec.max_tokens} over {spec.n_ranks} ranks needs {need} bytes of workspace, and {limit_bytes} may be used"
    advice = f"max_tokens of at most {most} fits" if most else "not even one token fits"
    raise ValueError(f"all-to-all backend {backend!r}: {what}; {advice} (or a smaller depth than {spec.depth})")
