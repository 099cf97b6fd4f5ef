"""Fixed orders: which row goes where, and sums whose order depends on nothing but slot and rank numbers, or the order of choices."""

from __future__ import annotations

import numpy as np
import torch


def sort_choices(slot_ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's choices in ascending slot order, none (-1) last: slots [T, k] int64 and weights [T, k] float32.

    A choice of the same slot twice keeps its column order.
    """
    ids = slot_ids.long()
    none = torch.iinfo(torch.int32).max
    ids, columns = torch.where(ids < 0, none, ids).sort(dim=1, stable=True)
    return torch.where(ids == none, -1, ids), weights.float().gather(1, columns)


def choices_of(slot_ids: torch.Tensor, weights: torch.Tensor, *, as_given: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a dispatch sends: slots [T, k] int64, -1 for none, and weights [T, k] float32.

    ``as_given``: in their columns' order, in which deterministic sums add them, so that it does not matter where experts are; else
    as ``sort_choices`` has them.
    """
    return (slot_ids.long().clamp(min=-1), weights.float()) if as_given else sort_choices(slot_ids, weights)


def positions(keys: torch.Tensor, n_keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stable counting order of ``keys`` [n] int64 in 0..n_keys - 1, where -1 means left out.

    Returns order [m] (indices into keys, by key then by index), place [n] (where each one went, -1 if left out), and
    counts [n_keys] int64 per key. m is known only after a sync on CUDA.
    """
    counts = torch.zeros(n_keys + 1, dtype=torch.int64, device=keys.device)
    bins = torch.where(keys < 0, n_keys, keys)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    order = _stable_order(bins, n_keys)
    left_out = int(counts[n_keys])
    if left_out:
        order = order[: keys.numel() - left_out]
    place = torch.full_like(keys, -1)
    place.scatter_(0, order, torch.arange(order.numel(), device=keys.device))
    return order, place, counts[:n_keys]


def _stable_order(bins: torch.Tensor, largest: int) -> torch.Tensor:
    """Stable argsort of ``bins``, whose values are 0..largest; on the CPU by numpy's radix sort where they fit."""
    if bins.device.type == "cpu" and largest < 2**15:
        return torch.from_numpy(np.argsort(bins.numpy().astype(np.int16), kind="stable"))
    return bins.argsort(stable=True)


def ordered_sum(rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """sum over c, in ascending c, of weights[t, c] * rows[index[t, c]] -> [T, H] float32; index -1 adds nothing.

    Every element is summed on its own from left to right, so that the result of a token depends neither on the other
    tokens nor on where its rows lie.
    """
    n, width = index.shape
    if index.numel() == 0 or rows.shape[0] == 0:
        return torch.zeros((n, rows.shape[1]), dtype=torch.float32, device=rows.device)
    rows = rows.float()
    valid = index >= 0
    if rows.device.type != "cpu":  # no sync: a row of zeros stands for none
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        index = torch.where(valid, index, rows.shape[0] - 1)
        weights = None if weights is None else torch.where(valid, weights, 0.0)  # of none it may be anything
    elif not bool(valid.all()):
        per_token = valid.sum(dim=1)
        flat = None if weights is None else weights[valid]
        return _bag(rows, index[valid], per_token.cumsum(0) - per_token, flat)
    starts = torch.arange(0, n * width, width, device=rows.device)
    return _bag(rows, index.reshape(-1), starts, None if weights is None else weights.reshape(-1))


def _bag(rows: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        weights = torch.ones(index.numel(), dtype=torch.float32, device=rows.device)
    return torch.embedding_bag(rows, index, starts, False, 0, False, weights, False, None)[0]
