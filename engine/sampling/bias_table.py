"""What requests add to the logits of tokens (``logit_bias``), by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..sampling_params import SamplingParams

NO_BIASES = np.zeros((0, 3), dtype=np.float64)
#: arrays by name -> the same on the device
Upload = Callable[[Mapping[str, NDArray[Any]]], dict[str, torch.Tensor]]


def by_slot(rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Rows by the slot in their first column, in the order they have; in one pass, however many slots there are."""
    if len(rows) == 0:
        return {}
    ordered = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = np.flatnonzero(np.diff(ordered[:, 0])) + 1
    return {int(group[0, 0]): group for group in np.split(ordered, ends)}


class BiasTable:
    """One row per slot: ``ids`` int64 [S, B] (-1 padded) and ``values`` fp32 [S, B]; B grows with the widest request."""

    def __init__(self, n_slots: int, device: torch.device | str) -> None:
        self.ids = torch.full((n_slots, 1), -1, dtype=torch.int64, device=device)
        self.values = torch.zeros((n_slots, 1), dtype=torch.float32, device=device)
        self.host = np.zeros(n_slots, dtype=np.bool_)  # slots with a bias

    def set(self, slots: NDArray[np.int64], new: NDArray[np.float64], upload: Upload) -> None:
        """Fill the rows of requests that enter ``slots`` [N]; ``new`` float64 [B, 3]: slot, token id, what is added."""
        assert np.isin(new[:, 0], slots).all(), "a bias names a slot that no request enters"
        stale = bool(self.host[slots].any())
        self.host[slots] = False
        if len(new) == 0 and not stale:
            return
        groups = by_slot(new)
        self._widen(max(map(len, groups.values()), default=0))
        ids = np.full((len(slots), self.ids.shape[1]), -1, dtype=np.int64)
        values = np.zeros(ids.shape, dtype=np.float32)
        for place, slot in enumerate(slots.tolist()):
            rows = groups.get(slot, NO_BIASES)
            ids[place, : len(rows)], values[place, : len(rows)] = rows[:, 1], rows[:, 2]
            self.host[slot] = len(rows) > 0
        found = upload({"slots": slots.astype(np.int64), "ids": ids, "values": values})
        self.ids[found["slots"]] = found["ids"]
        self.values[found["slots"]] = found["values"]

    def _widen(self, width: int) -> None:
        """Room for ``width`` tokens a request."""
        extra = width - self.ids.shape[1]
        if extra > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, extra), value=-1)
            self.values = torch.nn.functional.pad(self.values, (0, extra))

    def add(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``logits`` fp32 [n, V] of the requests in ``slots`` int64 [n] with their biases added; every id of a row occurs once."""
        ids = self.ids[slots]
        column = torch.where(ids >= 0, ids, logits.shape[1])  # padding goes to a spare column
        padded = torch.nn.functional.pad(logits, (0, 1))
        return padded.scatter_add(1, column, self.values[slots])[:, :-1]


def bias_rows(slot: int, params: SamplingParams) -> list[tuple[float, float, float]]:
    """Rows of ``StepPlan.new_biases`` for a request."""
    return [(float(slot), float(token), value) for token, value in params.biases]
