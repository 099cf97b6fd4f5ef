"""What both interfaces ask of a call's tokens: ids in their dtype, no rank without a token, values in their form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..dispatcher import EPSpec
from ..fp8 import quantise
from ..rows import is_fp8


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A call as deep_ep takes it.

    A rank without tokens brings one that nobody wants: not every version allows none. A slot that a token names again is named once,
    with the weights added: kernels of V2 stop at the second.
    """

    x: torch.Tensor  # bf16 [T, hidden], or e4m3
    scales: torch.Tensor | None  # float32 [T, hidden / 128] of e4m3
    ids: torch.Tensor  # [T, k], -1 for none, also beyond the valid tokens and for a slot named before
    weights: torch.Tensor  # float32 [T, k], 0 where ids are -1
    n: int  # the caller's tokens: T, or 0

    @classmethod
    def of(
        cls, spec: EPSpec, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, n_valid: torch.Tensor | None,
        scales: torch.Tensor | None, *, id_dtype: torch.dtype, quantised: bool,
    ) -> Tokens:  # fmt: skip
        """``quantised``: FP8 payloads are made here, not by the library."""
        n = len(x)
        if n == 0:
            x, ids, weights = x.new_zeros((1, spec.hidden)), ids.new_full((1, spec.top_k), -1), weights.new_zeros((1, spec.top_k))
            scales = None if scales is None else scales.new_zeros((1, scales.shape[1]))
        ids = ids.to(id_dtype)
        if n_valid is not None:
            ids = torch.where(torch.arange(len(x), device=x.device).unsqueeze(1) < n_valid, ids, -1)
        if is_fp8(spec) and quantised and scales is None:
            x, scales = quantise(x, ue8m0=spec.payload == "fp8_ue8m0")
        ids, weights = _once(ids, torch.where(ids >= 0, weights.float(), 0.0))
        return cls(x=x.contiguous(), scales=scales, ids=ids.contiguous(), weights=weights.contiguous(), n=n)

    def results(self, combined: torch.Tensor, spec: EPSpec) -> torch.Tensor:
        """What came back [T, hidden] -> the caller's rows, zeros where a token had no choice, in the spec's dtype."""
        out = combined.masked_fill((self.ids < 0).all(dim=1, keepdim=True), 0)
        return out[: self.n].to(getattr(torch, spec.dtype))


def _once(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every slot of a token at its first place [T, k], with the sum of its weights."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    first = ~same.tril(-1).any(dim=2) & (ids >= 0)
    total = torch.where(same, weights.unsqueeze(1), 0.0).sum(dim=2)
    return torch.where(first, ids, -1), torch.where(first, total, 0.0)


def process_group(group: Any) -> Any:
    """The torch.distributed group of ``group``. ValueError for a group of one that has none."""
    if group.process_group is None:
        raise ValueError("deep_ep needs a torch.distributed process group; a single rank has no use for it: take the local backend")
    return group.process_group
