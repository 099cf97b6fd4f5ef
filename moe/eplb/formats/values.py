"""Turns what files hold into arrays of counts and ids, and says what is wrong with the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..topology import Ints

#: more experts, slots of a rank or layers than any model has: ids above are damage, and arrays of their size would fill the memory
MOST = 1 << 16


def expert_count(slot_to_expert: Ints, said: Any, name: str) -> int:
    """Experts of a layer: as said, else one more than the largest id of the map.

    Raises:
        ValueError: more than any model has.
    """
    found = int(said) if said is not None else int(slot_to_expert.max(initial=-1)) + 1
    if not 0 <= found <= MOST:
        raise ValueError(f"{name}: has ids for {found} experts; the file is damaged, or this is not a map of experts")
    return found


def first_of(data: dict[str, Any], *names: str) -> Any:
    """The value of the first of these keys that is there; None if none is."""
    return next((data[name] for name in names if data.get(name) is not None), None)


def integers(value: Any, what: str, ndim: int | None = None) -> Ints:
    """An int64 array of ``ndim`` dimensions.

    Raises:
        ValueError: ragged or other values, or another number of dimensions.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{what}: rows have different lengths; each must have the same") from None
    if array.dtype == object or not (np.issubdtype(array.dtype, np.integer) or _whole(array)):
        raise ValueError(f"{what}: must be whole numbers, found {array.dtype}")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{what}: must have {ndim} dimensions, found shape {array.shape}")
    return array.astype(np.int64)


def counts_of(value: Any, what: str, scale: float | None = None) -> Ints:
    """Counts [steps, layers, experts] int64; [layers, experts] gets a step.

    Args:
        value: array or nested lists.
        what: name, for messages.
        scale: multiplies the values, which are then rounded: for shares and means, which are not counts.

    Raises:
        ValueError: values that are not counts (shares, means), negative ones, or another shape.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{what}: layers or steps have different numbers of experts; each must have the same") from None
    if array.dtype == object or array.dtype.kind not in "iufb":
        raise ValueError(f"{what}: must be numbers, found {array.dtype}")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        raise ValueError(f"{what}: must be [steps, layers, experts] or [layers, experts], found shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{what}: some values are not finite")
    if scale is not None:
        array = np.rint(array.astype(np.float64) * scale)
    elif not _whole(array):
        raise ValueError(f"{what}: {_not_counts(array)} Give `scale` (say 1e6) to use them as weights, if only their proportions matter.")
    if array.size and array.min() < 0:
        raise ValueError(f"{what}: {array.min()} is below zero: a counter has overflowed, or these are ids")
    return array.astype(np.int64)


def _whole(array: np.ndarray) -> bool:
    return array.dtype.kind in "iub" or (
        array.dtype.kind == "f" and bool((array == np.rint(array)).all()) and bool((abs(array) < 2**53).all())
    )


def _not_counts(array: np.ndarray) -> str:
    sums = array.sum(-1)
    sums = sums[sums > 0]
    if sums.size and np.ptp(sums) < 1e-3 * sums.max() and sums.max() <= 64:  # no router has more choices
        return f"these are shares, not counts: every layer sums to {float(sums.mean()):.4g}."
    return "these are fractions, not counts: means over steps, or an estimate."
