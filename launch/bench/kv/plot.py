"""The comparison of ways to serve cached prefixes, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..results import Row
from .sac_rows import OURS

_PANELS = ("time to the first token", "time between tokens", "throughput")


def _pyplot() -> Any:
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError:
        raise ValueError("a plot needs matplotlib, which is not installed; `pip install matplotlib`, or leave --plot out") from None


def _setting(row: Row) -> tuple[Any, ...]:
    return row.params["clients"], row.params["rest_of_a_layer_us_assumed"], row.params["gpus_on_the_network"]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw time to the first token, time between tokens and throughput over the context, for the most clients, the shortest rest and
    the fewest GPUs on the network.

    Raises:
        ValueError: matplotlib is not installed, or there is nothing to draw.
    """
    pyplot = _pyplot()
    shown = [row for row in rows if row.name in _PANELS]
    if not shown:
        raise ValueError("there is nothing to plot: the rows hold no closed loop of clients")
    clients = max(row.params["clients"] for row in shown)
    rest = min(row.params["rest_of_a_layer_us_assumed"] for row in shown)
    gpus = min(row.params["gpus_on_the_network"] for row in shown)
    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(15, 4.5))
    for name, axis in zip(_PANELS, axes, strict=True):
        picked = [row for row in shown if row.name == name and _setting(row) == (clients, rest, gpus)]
        picked.sort(key=lambda row: row.params["context"])
        contexts = [row.params["context"] / 1024 for row in picked]
        axis.plot(contexts, [row.value for row in picked], "o-", linewidth=2.5, label=OURS)
        for peer in picked[0].peers:
            axis.plot(contexts, [row.peers[peer] for row in picked], ".--", label=peer)
        axis.set(xlabel="cached prefix, k tokens", ylabel=f"{name}, {picked[0].unit}", yscale="log", xscale="log")
        axis.set_xticks([], minor=True)
        axis.set_xticks(contexts, [f"{context:g}" for context in contexts])
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend(fontsize=7)
    about = picked[0].params
    figure.suptitle(f"{clients} clients, {about['output']} tokens out, attention of {about['layers']} layers, {about['heads']} heads")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
