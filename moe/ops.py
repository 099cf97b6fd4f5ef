"""The operations that routing and experts are made of on the fused path: Triton kernels, or their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..parallel.backends import needing

Op = Callable[..., Any]

#: field of ``MoEOps`` -> (module in ``kernels``, function); the twin's module has "_torch" appended
_PLACES = {
    "route": ("router", "route"),
    "fused_experts": ("fused_experts", "fused_experts"),
    "expert_rows": ("fused_experts", "expert_rows"),
    "grouped_swiglu": ("fused_experts", "grouped_swiglu_device"),
}


@dataclass(frozen=True, kw_only=True)
class MoEOps:
    """One backend. The functions are those of ``moe.kernels``; their docstrings say shapes and dtypes."""

    name: str  # "torch" or "triton"
    route: Op  # from logits to experts, weights, slots and load counts
    fused_experts: Op  # experts of tokens that are on this rank, weights applied
    expert_rows: Op  # the same without the weights: an output for every choice
    grouped_swiglu: Op  # experts of tokens that arrived sorted by slot

    @classmethod
    def load(cls, name: str) -> MoEOps:
        """The kernels ("triton") or their twins ("torch").

        Raises:
            ValueError: another name, or Triton is not installed.
        """
        if name not in ("torch", "triton"):
            raise ValueError(f"moe backend must be torch or triton, found {name!r}")
        suffix = "_torch" if name == "torch" else ""
        with needing(f"moe backend {name!r}", ("triton",), "--moe-runner-backend torch"):
            found = {field: getattr(import_module(f".kernels.{m}{suffix}", __package__), f) for field, (m, f) in _PLACES.items()}
        return cls(name=name, **found)
