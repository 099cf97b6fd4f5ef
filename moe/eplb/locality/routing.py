"""Which experts tokens choose: samples of them, and a made router with DeepSeek-V3's node-limited gate and a known skew.

Loads say how often an expert is chosen; only tokens say which experts are chosen together, which is what makes a token travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..topology import Ints

Floats = npt.NDArray[np.float64]
Scores = npt.NDArray[np.float32]

_ROWS = 1024  # tokens gated at a time: scores of 1024 x 256 stay in the cache


@dataclass(frozen=True, kw_only=True)
class Gate:
    """How a token's experts are chosen from its scores. Defaults are DeepSeek-V3's."""

    n_experts: int = 256  # routed experts
    top_k: int = 8  # of a token
    n_groups: int = 8  # experts stand in this many groups of equal size, one behind the other
    topk_groups: int = 4  # groups that a token may use: those with the largest sum of two best scores

    def __post_init__(self) -> None:
        """ValueError: the numbers do not fit each other."""
        if self.n_groups < 1 or self.n_experts % self.n_groups or not 1 <= self.topk_groups <= self.n_groups:
            raise ValueError(
                f"gate: {self.n_experts} experts in {self.n_groups} groups of which {self.topk_groups} are used;"
                " groups must divide the experts, and the groups used be 1 to all of them"
            )
        if not 1 <= self.top_k <= self.topk_groups * (self.n_experts // self.n_groups):
            raise ValueError(
                f"gate: {self.top_k} choices of {self.topk_groups} groups of {self.n_experts // self.n_groups} experts; that is too many"
            )

    def choose(self, scores: Scores) -> Ints:
        """Scores [tokens, experts], bias added -> [tokens, top_k] different experts of each token, in no order."""
        if self.topk_groups < self.n_groups:
            grouped = scores.reshape(len(scores), self.n_groups, -1)
            best = np.partition(grouped, max(grouped.shape[-1] - 2, 0), axis=-1)[..., -2:].sum(-1)
            dropped = np.argpartition(best, self.n_groups - self.topk_groups, axis=1)[:, : self.n_groups - self.topk_groups]
            grouped = grouped.copy()
            np.put_along_axis(grouped, dropped[:, :, None], np.float32(-np.inf), axis=1)
            scores = grouped.reshape(scores.shape)
        return np.argpartition(scores, -self.top_k, axis=1)[:, -self.top_k :].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choices of some tokens in every layer: recorded token by token, or made."""

    ids: Ints  # [layers, tokens, top_k] different logical experts of each token; -1: none
    n_experts: int  # logical experts of a layer

    def __post_init__(self) -> None:
        """ValueError: not a table of choices."""
        if self.ids.ndim != 3 or not self.ids.size:
            raise ValueError(f"routing: ids must be [layers, tokens, top_k] and not empty, found shape {self.ids.shape}")
        low, high = int(self.ids.min()), int(self.ids.max())
        if low < -1 or high >= self.n_experts:
            raise ValueError(f"routing: ids must be experts 0 to {self.n_experts - 1}, or -1 for none; found {low} to {high}")

    @property
    def n_layers(self) -> int:
        """Layers with experts."""
        return int(self.ids.shape[0])

    @property
    def n_tokens(self) -> int:
        """Tokens of each layer."""
        return int(self.ids.shape[1])

    @property
    def load(self) -> Floats:
        """[layers, experts] choices of each expert."""
        return count(self.ids, self.n_experts)

    def tokens(self, first: int, last: int | None = None) -> Routing:
        """The choices of tokens ``first`` to ``last`` (exclusive): to plan with some and to judge by others."""
        return Routing(ids=self.ids[:, first:last], n_experts=self.n_experts)


def count(ids: Ints, n: int) -> Floats:
    """[layers, ..] numbers 0 to n - 1, or -1 for none -> [layers, n] how often each is there."""
    layers = len(ids)
    flat = (ids.reshape(layers, -1) + 1 + np.arange(layers)[:, None] * (n + 1)).ravel()
    return np.bincount(flat, minlength=layers * (n + 1)).reshape(layers, n + 1)[:, 1:].astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Router:
    """A made router: the odds of every expert in every layer, for tokens of several topics.

    A token's score of expert e is w / (w + x), the sigmoid of a logit log w + g with Gumbel noise g = -log x (x exponential): without
    groups the k best are then a draw without replacement with odds w. w is the expert's popularity times its factor in the token's topic.
    """

    odds: Scores  # [layers, topics, experts] they sum to top_k over experts, so that the k-th best score is near one half
    gate: Gate = Gate()

    def sample(self, n_tokens: int, *, seed: int = 0) -> Routing:
        """Choices of this many tokens, their topics drawn evenly and the same in every layer."""
        rng = np.random.default_rng(seed)
        topic = rng.integers(self.odds.shape[1], size=n_tokens)
        ids = np.empty((len(self.odds), n_tokens, self.gate.top_k), dtype=np.int64)
        for layer, odds in enumerate(self.odds):
            for first in range(0, n_tokens, _ROWS):
                w = odds[topic[first : first + _ROWS]]
                noise = rng.standard_exponential(w.shape, dtype=np.float32)
                ids[layer, first : first + _ROWS] = self.gate.choose(w / (w + noise))
        return Routing(ids=ids, n_experts=self.gate.n_experts)


def make_router(
    *,
    n_layers: int,
    gate: Gate = Gate(),
    sigma: float | tuple[float, float] = 1.15,
    topics: int = 16,
    topic_sigma: float = 0.7,
    seed: int = 0,
) -> Router:
    """A router whose expert loads are near to lognormal, as measured ones of DeepSeek-R1 are.

    Args:
        n_layers: MoE layers.
        gate: how experts are chosen.
        sigma: of the logarithm of an expert's load, or the lowest and highest of layers that differ evenly (measured: 1.05 over all).
        topics: kinds of tokens. One: experts are chosen together by nothing but the gate's groups.
        topic_sigma: of the logarithm of an expert's factor in a topic: how much tokens of a topic choose the same experts.
        seed: same arguments and seed, same router.

    Raises:
        ValueError: no topic.
    """
    if topics < 1:
        raise ValueError(f"router: topics must be 1 or more, found {topics}; one topic has no co-activation but the gate's groups")
    rng = np.random.default_rng(seed)
    low, high = (sigma, sigma) if isinstance(sigma, int | float) else sigma
    spread = rng.uniform(low, high, n_layers)[:, None]
    popularity = spread * rng.standard_normal((n_layers, gate.n_experts))
    factors = topic_sigma * rng.standard_normal((n_layers, topics, gate.n_experts)) if topics > 1 else np.zeros((1, 1, 1))
    share = np.exp(popularity) / np.exp(popularity).sum(1, keepdims=True)
    # an exponential draw with odds w is among the best with 1 - exp(-w): hot experts need more odds than their share
    chosen = np.minimum(share * gate.top_k, 0.95)
    return Router(odds=_odds(np.log(-np.log1p(-chosen)), factors, gate), gate=gate)


def fit_router(load: Floats, *, gate: Gate = Gate(), rounds: int = 8, tokens: int = 512, seed: int = 0) -> Router:
    """A router of one topic whose tokens load the experts as measured: what to plan with where only loads were recorded.

    Popularities are corrected by the loads of drawn tokens, round by round. An expert cannot be chosen twice by a token, nor often
    from a group that is seldom among the best, so that extreme loads are reached only nearly.

    Args:
        load: [layers, experts] tokens of each expert.
        gate: its group limit decides which experts are chosen together.
        rounds: of correction.
        tokens: drawn for each.
        seed: same arguments and seed, same router.

    Raises:
        ValueError: a load of another number of experts.
    """
    if load.ndim != 2 or load.shape[1] != gate.n_experts:
        raise ValueError(f"router: load must be [layers, {gate.n_experts} experts of the gate], found shape {load.shape}")
    share = np.maximum(load, 0) / np.maximum(load.sum(1, keepdims=True), 1e-30)
    target = (share + 1e-5) / (1 + 1e-5 * gate.n_experts)  # an expert that was never chosen is not impossible
    popularity = np.log(target)
    none = np.zeros((1, 1, 1))
    for n in range(rounds):
        drawn = Router(odds=_odds(popularity, none, gate), gate=gate).sample(tokens, seed=seed + n).load
        choices = tokens * gate.top_k
        # the prior keeps an expert that few drawn tokens chose from jumping
        popularity += 0.7 * (np.log(target * choices + 4.0) - np.log(drawn + 4.0))
    return Router(odds=_odds(popularity, none, gate), gate=gate)


def _odds(popularity: Floats, factors: Floats, gate: Gate) -> Scores:
    w = np.exp(popularity[:, None, :] + factors)
    odds: Scores = (w * gate.top_k / w.sum(-1, keepdims=True)).astype(np.float32)
    return odds
