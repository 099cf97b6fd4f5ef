"""One dispatch over peer memory, from its send to its combine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layouts import Arrangement
from .wire import Wire


@dataclass(kw_only=True)
class Flight:
    """One dispatch from its send to its combine: the ticket of every half."""

    channel: int
    wire: Wire  # layout of this call
    ids: torch.Tensor  # int32 [T, k] as sent
    weights: torch.Tensor  # float32 [T, k] as sent
    n_valid: torch.Tensor | None
    tag: int
    epoch: int  # number on the host
    arrangement: Arrangement | None = None  # of a sorted layout
    pull: bool = False  # results are fetched from the ranks that made them
