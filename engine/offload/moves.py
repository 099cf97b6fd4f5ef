"""What changes place before and after a step, collected for its plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from ..plan import I32, StepPlan


@dataclass(kw_only=True)
class Moves:
    """Changes since the last plan that had rows. A later change of one place replaces an earlier one."""

    device: dict[int, int] = field(default_factory=dict)  # logical page -> device page, -1: none
    host: dict[int, int] = field(default_factory=dict)  # logical page -> host page with a finished copy, -1: none
    hot: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, index in its lease) -> device page, -1: no longer one
    moving: dict[int, int] = field(default_factory=dict)  # slot -> 1: its resident rows go into the hot buffer
    restores: dict[int, tuple[int, int]] = field(default_factory=dict)  # logical page -> (host page, device page)
    mirrors: list[tuple[int, int]] = field(default_factory=list)  # (device page, host page), after the step
    mirrored: list[int] = field(default_factory=list)  # logical pages of ``mirrors``, where their index keys are copied too
    imports: dict[int, int] = field(default_factory=dict)  # logical page -> host page of the directory that has its index keys
    seeds: list[int] = field(default_factory=list)  # slots whose last prompt tokens choose their first hot rows
    vacated: list[int] = field(default_factory=list)  # device pages whose rows nobody wants any more

    def write(self, plan: StepPlan) -> None:
        """Put everything into ``plan``."""
        if self.device:
            plan.device_pages = _pairs(self.device)
        if self.host:
            plan.host_pages = _pairs(self.host)
        if self.hot:
            plan.hot_pages = np.array([(*place, page) for place, page in self.hot.items()], dtype=np.int32)
        if self.moving:
            plan.moving = _pairs(self.moving)
        if self.restores:
            plan.restores = np.array(list(self.restores.values()), dtype=np.int32)
        if self.mirrors:
            plan.mirrors = np.fromiter(chain.from_iterable(self.mirrors), np.int32, 2 * len(self.mirrors)).reshape(-1, 2)
        if self.mirrored:
            plan.mirrored = np.array(self.mirrored, dtype=np.int32)
        if self.imports:
            plan.imports = _pairs(self.imports)
        if self.seeds:
            plan.seeds = np.array(self.seeds, dtype=np.int32)
        if self.vacated:
            plan.vacated = np.array(self.vacated, dtype=np.int32)


def _pairs(changes: dict[int, int]) -> I32:
    return np.fromiter(chain.from_iterable(changes.items()), np.int32, 2 * len(changes)).reshape(-1, 2)
