"""Measures of balance, all from one definition of the loads, so that numbers of different engines can be compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from .topology import Topology

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Balance of many rows of loads. A row is one layer (of one step); rows in which nothing was routed are left out."""

    rows: int  # rows that were measured
    idle: int  # rows left out: all their loads are zero
    imbalance: float  # mean over rows of max / mean: 1 is perfect
    worst: float  # largest max / mean of a row
    mean_over_max: float  # mean over rows of mean / max (SGLang's balancedness)
    means_over_maxima: float  # sum over rows of means / sum over rows of maxima (vLLM's balancedness)
    excess: float  # mean over rows of (max - mean) / mean (TensorRT-LLM's imbalance ratio)
    cv: float  # mean over rows of standard deviation / mean
    gini: float  # mean over rows of the Gini index: 0 is perfect
    jain: float  # mean over rows of Jain's fairness index: 1 is perfect

    def as_dict(self) -> dict[str, float]:
        """Names and values, for JSON."""
        return asdict(self)


#: field of Balance -> how tables call it, and whose measure it is
MEASURES = {
    "imbalance": "max/mean",
    "worst": "worst",
    "mean_over_max": "mean/max (SGLang)",
    "means_over_maxima": "means/maxima (vLLM)",
    "excess": "(max-mean)/mean (TRT-LLM)",
    "cv": "CV",
    "gini": "Gini",
    "jain": "Jain",
}


def balance(loads: npt.ArrayLike, topology: Topology | None = None) -> Balance:
    """The measures of loads [..., ranks] (or [..., experts]): every leading index is a row.

    Args:
        loads: tokens, not negative.
        topology: of the ranks, the last axis. Failed ranks are left out. With speeds a rank's load counts as its time, load over
            speed, and weighs as its speed, so that the mean is the time of a perfect split.

    Raises:
        ValueError: nothing to measure, or loads that are negative or not numbers.
    """
    rows, speed = _rows(loads, topology)
    weights = speed / len(speed)
    busy = rows.max(1) > 0
    idle = int((~busy).sum())
    rows = rows[busy]
    if len(rows) == 0:
        raise ValueError(f"balance: all {idle} rows of loads are zero; nothing was routed, or nothing was recorded")
    mean, most = rows @ weights, rows.max(1)
    ratio = most / mean
    return Balance(
        rows=len(rows),
        idle=idle,
        imbalance=float(ratio.mean()),
        worst=float(ratio.max()),
        mean_over_max=float((mean / most).mean()),
        means_over_maxima=float(mean.sum() / most.sum()),
        excess=float((ratio - 1.0).mean()),
        cv=float((_deviation(rows, weights) / mean).mean()),
        gini=float(_gini(rows, weights).mean()),
        jain=float((mean**2 / (rows**2 @ weights)).mean()),
    )


def imbalance(loads: npt.ArrayLike, topology: Topology | None = None) -> Floats:
    """Max / mean of loads [..., ranks] -> [...]; 1 where nothing was routed. Arguments as of ``balance``."""
    values = np.asarray(loads, dtype=np.float64)
    rows, speed = _rows(values, topology)
    mean, most = rows @ speed / len(speed), rows.max(1)
    found: Floats = np.divide(most, mean, out=np.ones_like(mean), where=mean > 0)
    return found.reshape(values.shape[:-1])


def gini(loads: npt.ArrayLike) -> Floats:
    """Gini index of loads [..., experts] -> [...]; 0 where nothing was routed."""
    values = np.asarray(loads, dtype=np.float64)
    rows, speed = _rows(values, None)
    found: Floats = _gini(rows, speed / len(speed)).reshape(values.shape[:-1])
    return found


def _rows(loads: npt.ArrayLike, topology: Topology | None) -> tuple[Floats, Floats]:
    """[rows, parts] loads (times where speeds differ), and the speed of each part, 1 on average."""
    values = np.asarray(loads, dtype=np.float64)
    if values.ndim == 0 or values.size == 0:
        raise ValueError(f"balance: loads must be [..., ranks] with at least one row and one rank, found shape {values.shape}")
    rows = values.reshape(-1, values.shape[-1])
    if not (rows >= 0).all() or not np.isfinite(rows).all():
        raise ValueError("balance: loads must be finite and not negative; a count below zero has overflowed or was never written")
    if topology is not None:
        if topology.n_ranks != rows.shape[1]:
            raise ValueError(f"balance: loads have {rows.shape[1]} ranks and the topology {topology.n_ranks}")
        speed = topology.speed[topology.alive]
        return rows[:, topology.alive] / speed, speed
    return rows, np.ones(rows.shape[1])


def _deviation(rows: Floats, weights: Floats) -> Floats:
    """[rows] standard deviation."""
    mean = rows @ weights
    found: Floats = np.sqrt((rows - mean[:, None]) ** 2 @ weights)
    return found


def _gini(rows: Floats, weights: Floats) -> Floats:
    """[rows] Gini index: one minus twice the area below the Lorenz curve, which is straight between its points."""
    order = np.argsort(rows, axis=1)
    share = np.take_along_axis(rows, order, 1) * weights[order]
    whole = share.sum(1, keepdims=True)
    curve = np.cumsum(np.divide(share, whole, out=np.broadcast_to(weights, share.shape).copy(), where=whole > 0), axis=1)
    below = (curve - np.diff(curve, axis=1, prepend=0.0) / 2) * weights[order]
    found: Floats = 1.0 - 2.0 * below.sum(1)
    return np.where(whole[:, 0] > 0, found, 0.0)
