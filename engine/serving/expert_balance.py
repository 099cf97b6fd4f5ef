"""How evenly tokens fall on the expert ranks, from what each leader counted of its own tokens; plain arrays as bytes between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack(table: NDArray[np.int64], layers: Sequence[int]) -> dict[str, Any]:
    """Counts [layers, n] for a message; ``layers`` are the model's numbers of the rows. They are cut to int32."""
    return {"layers": list(layers), "columns": table.shape[1], "counts": np.minimum(table, 2**31 - 1).astype("<i4").tobytes()}


def unpack(packed: dict[str, Any]) -> NDArray[np.int64]:
    """The inverse of ``pack``.

    Raises:
        ValueError: bytes that are no such table.
    """
    return np.frombuffer(packed["counts"], dtype="<i4").astype(np.int64).reshape(len(packed["layers"]), packed["columns"])


def added(tables: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Packed tables of several leaders, which run the same layers, as one; None without any."""
    if not tables:
        return None
    return pack(sum(unpack(table) for table in tables), tables[0]["layers"])  # type: ignore[arg-type]


def rank_loads(counts: NDArray[np.int64], slot_to_expert: NDArray[np.int64], n_ranks: int) -> NDArray[np.int64]:
    """Choices that fall on each EP rank, [layers, ranks]: those of an expert are shared evenly among its slots.

    Args:
        counts: [layers, experts] choices of each expert.
        slot_to_expert: [layers, slots] expert of each slot, -1 for none; ranks hold equal runs of slots.
        n_ranks: EP ranks.
    """
    held = np.maximum(slot_to_expert, 0)
    copies = np.zeros_like(counts)
    for layer, row in enumerate(slot_to_expert):
        copies[layer] = np.bincount(row[row >= 0], minlength=counts.shape[1])
    each = np.take_along_axis(counts / np.maximum(copies, 1), held, axis=1)
    each[slot_to_expert < 0] = 0
    loads: NDArray[np.int64] = np.rint(each.reshape(len(counts), n_ranks, -1).sum(-1)).astype(np.int64)
    return loads


def balance(loads: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Balance of the last second, from the packed counts [layers, EP ranks] of all leaders; None when nothing was counted.

    ``balancedness``: mean over maximum of the ranks' loads, averaged over layers; 1 is even. ``worst`` is the lowest of all layers, that
    of the model's layer ``worst_layer``. ``rank_loads``: choices that each EP rank got, over the layers.
    """
    total = added(loads)
    if total is None:
        return None
    table = unpack(total)
    busiest = table.max(axis=1)
    layers = np.flatnonzero(busiest)
    if not len(layers):
        return None
    shares = table[layers].mean(axis=1) / busiest[layers]
    worst = int(shares.argmin())
    return {
        "balancedness": float(shares.mean()),
        "worst": float(shares[worst]),
        "worst_layer": int(total["layers"][layers[worst]]),
        "rank_loads": table.sum(axis=0).tolist(),
    }
