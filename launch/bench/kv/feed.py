"""What the rig's indexers would choose: traces on the device, dealt out to layers and requests step by step."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .record import load
from .shape import TRACES, RigShape
from .traces import Selection, scaled, steps

_APART = 7  # steps between the places at which neighbouring requests enter a trace


class Feed:
    """Buffers of fixed addresses that hold one step's choices; ``advance`` fills them with the next step's.

    The layers take ``trace_kinds`` traces in turn; requests enter a trace at different steps. A trace is played back and forth:
    its process looks the same backwards.
    """

    def __init__(self, shape: RigShape, device: torch.device | str) -> None:
        self.shape, self.step = shape, 0
        scores, chosen = _bank(shape.trace, shape.context, shape.k, shape.steps, shape.trace_kinds)
        self._scores, self._chosen = torch.from_numpy(scores).to(device), torch.from_numpy(chosen).to(device)
        self.scores = torch.empty(shape.trace_kinds, shape.requests, shape.context, dtype=torch.float32, device=device)
        self.positions = torch.empty(shape.trace_kinds, shape.requests, shape.k, dtype=torch.int32, device=device)
        last = max(1, shape.steps - 1)
        at = (np.arange(shape.requests) * _APART + np.arange(2 * last)[:, None]) % (2 * last)
        self._cursors = torch.from_numpy(np.minimum(at, 2 * last - at).clip(max=shape.steps - 1)).to(device)
        self._load()

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions int32 [R, k] and scores fp32 [R, context] of a layer: views of the buffers."""
        kind = layer % self.shape.trace_kinds
        return self.positions[kind], self.scores[kind]

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1
        self._load()

    def restart(self) -> None:
        """Go back to the first step."""
        self.step = 0
        self._load()

    def _load(self) -> None:
        cursor = self._cursors[self.step % len(self._cursors)]
        for kind in range(self.shape.trace_kinds):
            torch.index_select(self._scores[kind], 0, cursor, out=self.scores[kind])
            torch.index_select(self._chosen[kind], 0, cursor, out=self.positions[kind])


@lru_cache(maxsize=2)
def _bank(name: str, context: int, k: int, count: int, kinds: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Scores [kinds, count, context], -inf behind the last position of a step, and choices [kinds, count, k].

    Raises:
        ValueError: a recorded trace does not suit the shape.
    """
    scores = np.full((kinds, count, context), -np.inf, np.float32)
    chosen = np.empty((kinds, count, k), np.int32)
    for kind, trace in enumerate(_traces(name, context, k, count, kinds)):
        for step, selection in enumerate(trace):
            scores[kind, step, : len(selection.scores)] = selection.scores
            chosen[kind, step] = selection.chosen
    return scores, chosen


def _traces(name: str, context: int, k: int, count: int, kinds: int) -> list[list[Selection]]:
    """Made traces, or the last ``kinds`` layers of a recorded one, each of whose tokens stands for several neighbours."""
    if name in TRACES:
        return [list(steps(scaled(TRACES[name], context=context - count, k=k, seed=kind), count)) for kind in range(kinds)]
    recorded = [trace[:count] for trace in load(Path(name))[-kinds:]]
    found, longest = len(recorded[0][0].chosen), len(recorded[0][-1].scores)
    factor = k // found
    if k % found or longest * factor > context or len(recorded) < kinds or len(recorded[0]) < count:
        raise ValueError(
            f"{name} holds {len(recorded)} layers and {len(recorded[0])} steps of {found} among {longest} positions, which do not make "
            f"{kinds} layers and {count} steps of {k} among {context}; k must be a multiple, and the context at least {longest * factor}"
        )
    near = np.arange(factor)
    return [[Selection(np.repeat(s.scores, factor), (s.chosen[:, None] * factor + near).ravel()) for s in trace] for trace in recorded]
