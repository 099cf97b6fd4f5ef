"""What ``release_hot.release_hot`` computes, in plain PyTorch."""

from __future__ import annotations

import torch

from ..kv.tier import NOWHERE


def release_hot(hot_positions: torch.Tensor, slots: torch.Tensor, first: torch.Tensor, last: torch.Tensor, *, page_size: int) -> None:
    """Forget what hot rows hold, in every layer, because their slot's request or the device pages under them leave.

    Args:
        hot_positions: int32 [L, S + 1, H * page_size], of all layers. Positions of the hot rows concerned become -1.
        slots: int32 [n], request slots; a slot may occur more than once.
        first: int32 [n], first page of the slot's lease to be emptied.
        last: int32 [n], end of that range (0 and H: all of the slot).
        page_size: hot rows a page.
    """
    for slot, begin, end in zip(slots.tolist(), first.tolist(), last.tolist(), strict=True):
        hot_positions[:, slot, begin * page_size : end * page_size] = NOWHERE
