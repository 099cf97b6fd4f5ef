"""Makes loads with the skew, the drift and the noise of real models."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..topology import Ints
from ..trace import PHASES, LoadTrace
from .synth_config import SynthConfig

Floats = npt.NDArray[np.float64]


def synth(config: SynthConfig | None = None) -> LoadTrace:
    """A load trace. Every layer's counts of a step sum to tokens * top_k, and no expert has more than all tokens.

    The log of an expert's popularity is the sum of a part that all steps have in common, one of the step's domain, one of its
    phase, and noise that follows an AR(1) process; their variances sum to sigma squared. With ``drift`` the common part wanders
    and keeps its variance. The tokens of a step are drawn with these shares (multinomial).
    """
    config = config or SynthConfig()
    rng = np.random.default_rng(config.seed)
    domain, phase = _domains(config, rng), _phases(config, rng)
    tokens = np.where(phase == PHASES.index("decode"), config.decode_tokens or 0, config.tokens).astype(np.int64)
    walk = _Popularity(config, rng)
    counts = np.zeros((config.n_steps, config.n_layers, config.n_experts), dtype=np.int64)
    for step in range(config.n_steps):
        popularity = walk.next(int(domain[step]), config.phases.index(PHASES[phase[step]]))
        counts[step] = draw(popularity, int(tokens[step]), config.top_k, rng)
    return LoadTrace(
        counts=counts,
        layer_ids=tuple(range(config.first_layer, config.first_layer + config.n_layers)),
        top_k=config.top_k,
        tokens=tokens,
        phase=phase,
        domain=tuple(config.domains[d] for d in domain),
        meta={"source": "synth", "seed": str(config.seed)},
    )


def popularity(
    n_layers: int = 58, n_experts: int = 256, *, sigma: tuple[float, float] = (1.05, 1.05), seed: int | np.random.Generator = 0
) -> Floats:
    """[layers, experts] expected shares of a layer's tokens, summing to 1 in each: lognormal, sigma even between two numbers."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(*sigma, (n_layers, 1))
    return _shares(spread * rng.standard_normal((n_layers, n_experts)))


def drifted(load: npt.ArrayLike, amount: float, *, seed: int | np.random.Generator = 0) -> Floats:
    """The load with each entry multiplied by its own lognormal factor, of standard deviation ``amount`` in the log.

    What a plan meets later (drift) or in a single batch (noise); the total of each row is kept.
    """
    before = np.asarray(load, dtype=np.float64)
    after = before * np.exp(amount * np.random.default_rng(seed).standard_normal(before.shape))
    whole = after.sum(-1, keepdims=True)
    found: Floats = after * np.divide(before.sum(-1, keepdims=True), whole, out=np.ones_like(whole), where=whole > 0)
    return found


def draw(shares: npt.ArrayLike, tokens: int, top_k: int, rng: np.random.Generator) -> Ints:
    """[layers, experts] counts of ``tokens`` tokens that choose ``top_k`` experts each with these shares [layers, experts].

    Multinomial. A token cannot choose an expert twice, so what exceeds the number of tokens goes to the other experts.
    """
    shares = np.asarray(shares, dtype=np.float64)
    counts = rng.multinomial(tokens * top_k, shares).astype(np.int64)
    for layer in np.flatnonzero((counts > tokens).any(1)):
        while (over := int(np.maximum(counts[layer] - tokens, 0).sum())) > 0:
            counts[layer] = np.minimum(counts[layer], tokens)
            room = np.where(counts[layer] < tokens, np.maximum(shares[layer], 1e-12), 0.0)
            counts[layer] += rng.multinomial(over, room / room.sum())
    return counts


class _Popularity:
    """Shares of the experts, step after step."""

    def __init__(self, config: SynthConfig, rng: np.random.Generator) -> None:
        shape = (config.n_layers, config.n_experts)
        self.config, self.rng = config, rng
        sigma = rng.uniform(*config.sigma, (config.n_layers, 1))
        self.scale = np.sqrt(np.maximum(sigma**2 - config.noise**2, 0.0))  # of all that is not noise
        self.noise_scale = np.minimum(config.noise, sigma)
        self.common = rng.standard_normal(shape)
        own = config.domain_share if len(config.domains) > 1 else 0.0  # parts of one member belong to what all steps have in common
        other = config.phase_share if len(config.phases) > 1 else 0.0
        self.weights = math.sqrt(1.0 - own - other), math.sqrt(own), math.sqrt(other)
        self.domains = rng.standard_normal((len(config.domains), *shape))
        self.phases = rng.standard_normal((len(config.phases), *shape))
        self.noise = rng.standard_normal(shape)

    def next(self, domain: int, phase: int) -> Floats:
        """[layers, experts] shares of the next step."""
        common, own, other = self.weights
        z = common * self.common + own * self.domains[domain] + other * self.phases[phase]
        shares = _shares(self.scale * z + self.noise_scale * self.noise)
        self._walk()
        return shares

    def _walk(self) -> None:
        memory = self.config.memory
        self.noise = memory * self.noise + math.sqrt(1.0 - memory**2) * self.rng.standard_normal(self.noise.shape)
        if self.config.drift:
            # a stationary walk: after 1,000 steps the log has moved by `drift`, and its variance is what it was
            part = np.minimum(self.config.drift / math.sqrt(1000.0) / np.maximum(self.scale * self.weights[0], 1e-9), 1.0)
            self.common = np.sqrt(1.0 - part**2) * self.common + part * self.rng.standard_normal(self.common.shape)


def _shares(log: Floats) -> Floats:
    raw = np.exp(log - log.max(-1, keepdims=True))
    shares: Floats = raw / raw.sum(-1, keepdims=True)
    return shares


def _domains(config: SynthConfig, rng: np.random.Generator) -> Ints:
    """[steps] domain of each step: another follows after ``dwell`` steps on average."""
    n = len(config.domains)
    found = np.zeros(config.n_steps, dtype=np.int64)
    if n == 1:
        return found
    found[0] = rng.integers(n)
    for step in range(1, config.n_steps):
        changes = rng.random() < 1.0 / config.dwell
        found[step] = (found[step - 1] + (rng.integers(1, n) if changes else 0)) % n
    return found


def _phases(config: SynthConfig, rng: np.random.Generator) -> Ints:
    """[steps] index into PHASES."""
    if config.decode_tokens is None:
        return np.full(config.n_steps, PHASES.index("mixed"), dtype=np.int64)
    decode = rng.random(config.n_steps) < config.decode_share
    return np.where(decode, PHASES.index("decode"), PHASES.index("prefill")).astype(np.int64)
