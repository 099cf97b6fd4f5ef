"""A recorded or made load: how many tokens each step routed to each expert."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .topology import Ints

PHASES = ("mixed", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class LoadTrace:
    """Counts of all EP ranks together, padding excluded. A trace of one window has one step."""

    counts: Ints  # [steps, layers, experts] routed choices
    layer_ids: tuple[int, ...]  # number of each layer in the model: dense layers have none here
    top_k: int | None = None  # choices of a token, where known: then every layer's counts of a step sum to tokens * top_k
    tokens: Ints | None = None  # [steps] tokens of each step, where known
    phase: Ints | None = None  # [steps] index into PHASES, where known
    domain: tuple[str, ...] | None = None  # [steps] name of the workload of each step, where known
    n_ranks: int | None = None  # EP ranks that were recorded, where known
    meta: dict[str, str] = field(default_factory=dict)  # model, source, date ..; kept by every format that can

    def __post_init__(self) -> None:
        """ValueError: the parts do not fit each other."""
        if self.counts.ndim != 3:
            raise ValueError(f"load trace: counts must be [steps, layers, experts], found shape {self.counts.shape}")
        steps, layers, _ = self.counts.shape
        if len(self.layer_ids) != layers:
            raise ValueError(f"load trace: counts have {layers} layers and {len(self.layer_ids)} layer ids; give one for each")
        for name, values in (("tokens", self.tokens), ("phase", self.phase), ("domain", self.domain)):
            if values is not None and len(values) != steps:
                raise ValueError(f"load trace: {name} has {len(values)} entries for {steps} steps")
        if self.counts.size and self.counts.min() < 0:
            raise ValueError(f"load trace: counts must not be negative, found {self.counts.min()}")
        if self.counts.size and float(self.counts.max()) * steps * self.n_experts >= 2.0**63:
            raise ValueError(
                f"load trace: a count of {self.counts.max()} is more than any step routes, and sums would overflow; is it damaged?"
            )

    @property
    def total(self) -> Ints:
        """[layers, experts] over all steps."""
        summed: Ints = self.counts.sum(0)
        return summed

    @property
    def n_steps(self) -> int:
        """Steps."""
        return int(self.counts.shape[0])

    @property
    def n_experts(self) -> int:
        """Logical experts of a layer."""
        return int(self.counts.shape[2])

    def select(self, steps: np.ndarray) -> LoadTrace:
        """The trace of some steps: indices or a mask."""
        chosen = np.arange(self.n_steps)[steps]
        return LoadTrace(
            counts=self.counts[chosen],
            layer_ids=self.layer_ids,
            top_k=self.top_k,
            tokens=None if self.tokens is None else self.tokens[chosen],
            phase=None if self.phase is None else self.phase[chosen],
            domain=None if self.domain is None else tuple(self.domain[step] for step in chosen),
            n_ranks=self.n_ranks,
            meta=self.meta,
        )
