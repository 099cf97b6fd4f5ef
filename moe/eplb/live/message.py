"""A plan as it travels: numbers of a size that all ranks know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..topology import Ints

_TEXT_BYTES = 1024
_HEAD = 4  # words in front: good, bytes of text, imbalance before and after (the bits of float64)


@dataclass(frozen=True, kw_only=True)
class PlanMessage:
    """What the planning rank says: a plan, or why there is none."""

    good: bool
    slots: Ints  # [layers, slots]
    text: str  # reason of the plan, or of there being none; the first 1024 bytes travel
    before: float = 0.0
    after: float = 0.0

    def encode(self, shape: tuple[int, ...]) -> torch.Tensor:
        """int64, of a length that follows from ``shape`` [layers, slots]."""
        assert self.slots.shape == shape, (self.slots.shape, shape)
        text = self.text.encode()[:_TEXT_BYTES]
        words = np.zeros(_HEAD + _TEXT_BYTES // 8 + self.slots.size, dtype=np.int64)
        words[:2] = int(self.good), len(text)
        words[2:_HEAD].view(np.float64)[:] = self.before, self.after
        words[_HEAD : _HEAD + _TEXT_BYTES // 8].view(np.uint8)[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        words[_HEAD + _TEXT_BYTES // 8 :] = self.slots.ravel()
        return torch.from_numpy(words)

    @classmethod
    def decode(cls, message: torch.Tensor, shape: tuple[int, ...]) -> PlanMessage:
        """What ``encode`` made for the same shape."""
        words = message.numpy()
        good, length = bool(words[0]), int(words[1])
        before, after = words[2:_HEAD].view(np.float64).tolist()
        text = words[_HEAD : _HEAD + _TEXT_BYTES // 8].view(np.uint8)[:length].tobytes().decode(errors="replace")
        slots = words[_HEAD + _TEXT_BYTES // 8 :].reshape(shape).copy()
        return cls(good=good, slots=slots, text=text, before=before, after=after)
