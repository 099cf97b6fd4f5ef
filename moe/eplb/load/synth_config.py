"""What a made load is like."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..trace import PHASES

_MOST_TOKENS = 10**12  # of a step: sums of steps and choices stay exact


@dataclass(frozen=True, kw_only=True)
class SynthConfig:
    """A load whose experts' popularity is lognormal within a layer.

    The defaults are calibrated on the published routing of DeepSeek-R1 (TensorRT-LLM's blog on expert parallelism: 32 ranks of
    8 experts, machine translation): coefficients of variation 0.48 of ranks and 1.28 of experts, (max - mean) / mean 1.56 and
    10.9, layers between 0.46 and 2.46.
    """

    n_layers: int = 58  # MoE layers
    n_experts: int = 256  # logical experts of a layer
    top_k: int = 8  # different experts that a token chooses
    first_layer: int = 3  # number of the first MoE layer in the model
    n_steps: int = 64  # steps
    tokens: int = 4096  # tokens of a step over all ranks: its batch size
    decode_tokens: int | None = None  # tokens of a decode step, if phases alternate; None: every step is of phase `mixed`
    decode_share: float = 0.9  # part of the steps that are decode, with `decode_tokens`
    sigma: tuple[float, float] = (0.9, 1.2)  # a layer's standard deviation of the log of popularity, even between these two
    domains: tuple[str, ...] = ("general",)  # workloads; each step is of one
    domain_share: float = 0.5  # part of the variance of the log of popularity that a domain has for itself
    phase_share: float = 0.1  # the same of a phase: the rest is common to prefill and decode
    dwell: float = 32.0  # steps that a domain lasts on average
    noise: float = 0.2  # standard deviation of the log of popularity that changes from step to step
    memory: float = 0.7  # correlation of that noise between a step and the next (AR(1))
    drift: float = 0.0  # standard deviation of the log of popularity by which a layer's experts wander in 1,000 steps
    seed: int = 0  # the same seed gives the same load

    def __post_init__(self) -> None:
        """ValueError: a value that makes no load."""
        low, high = self.sigma
        if not all(math.isfinite(value) for value in (*self.sigma, self.noise, self.memory, self.dwell, self.drift)):
            raise ValueError("synth: sigma, noise, memory, dwell and drift must be finite numbers")
        if min(self.seed, self.first_layer) < 0 or max(self.tokens, self.decode_tokens or 0) > _MOST_TOKENS:
            raise ValueError(
                f"synth: seed and first_layer must be 0 or more and tokens at most {_MOST_TOKENS:,}, found seed={self.seed}, "
                f"first_layer={self.first_layer}, tokens={self.tokens}, decode_tokens={self.decode_tokens}"
            )
        if min(self.n_layers, self.n_experts, self.n_steps, self.tokens) < 1 or not 1 <= self.top_k <= self.n_experts:
            raise ValueError(
                f"synth: needs layers, experts, steps and tokens of one or more and 1 <= top_k <= experts, found layers={self.n_layers}, "
                f"experts={self.n_experts}, steps={self.n_steps}, tokens={self.tokens}, top_k={self.top_k}"
            )
        if not 0 <= low <= high or not 0 <= self.noise or (low > 0 and self.noise > low):
            raise ValueError(f"synth: sigma must be two numbers low <= high, both at least the noise {self.noise}, found {self.sigma}")
        if not self.domains or len(set(self.domains)) != len(self.domains) or self.dwell < 1:
            raise ValueError(f"synth: needs different names of domains and a dwell of one step or more, found {self.domains}, {self.dwell}")
        for name in ("domain_share", "phase_share", "decode_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"synth: {name} must be between 0 and 1, found {getattr(self, name)}")
        if self.domain_share + self.phase_share > 1 or not 0 <= self.memory < 1 or self.drift < 0:
            raise ValueError(
                "synth: needs domain_share + phase_share <= 1, 0 <= memory < 1 and drift >= 0, found "
                f"{self.domain_share} + {self.phase_share}, {self.memory}, {self.drift}"
            )
        if self.decode_tokens is not None and self.decode_tokens < 1:
            raise ValueError(f"synth: decode_tokens must be one or more, found {self.decode_tokens}")

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that occur."""
        return PHASES[:1] if self.decode_tokens is None else PHASES[1:]
