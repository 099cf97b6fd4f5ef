"""Index keys and queries to weigh formats on: of the embedded model on its held-out text, and made up with DeepSeek-V3.2's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ....attention.indexer import Indexer
from ....attention.kv.cache import LayerCache
from .record import TINY

_HEADS, _WIDTH = 64, 128


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What one layer scores: after RoPE, before Hadamard's transform."""

    keys: torch.Tensor  # fp32 [L, D]
    queries: torch.Tensor  # fp32 [n, H, D]
    weights: torch.Tensor  # fp32 [n, H]

    def last(self, context: int, tokens: int) -> Scored:
        """The last ``tokens`` of the first ``context`` tokens, and the keys that the first of them sees."""
        some = slice(context - tokens, context)
        return Scored(keys=self.keys[: context - tokens + 1], queries=self.queries[some], weights=self.weights[some])


def made_up(context: int, tokens: int, seed: int) -> Scored:
    """Gaussian keys and queries as DeepSeek-V3.2 has them, with what makes rounding hard.

    Channels of unequal spread and offset, three of them eight times as large (before the LayerNorm of the key); queries of a token share
    a direction; head weights of both signs.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    keys = normal(context, _WIDTH) * torch.exp(0.5 * normal(_WIDTH)) + 0.3 * normal(_WIDTH)
    keys[:, torch.randperm(_WIDTH, generator=rng)[:3]] *= 8
    queries = normal(tokens, _HEADS, _WIDTH) + 0.7 * normal(tokens, 1, _WIDTH)
    weights = 0.5 * normal(tokens, _HEADS).abs() + 0.3 * normal(tokens, _HEADS)
    return Scored(keys=functional.layer_norm(keys, (_WIDTH,)), queries=queries, weights=weights)


class _Listener:
    """Collects the keys and queries of every layer's indexer, in the order of the tokens."""

    def __init__(self) -> None:
        self.parts: dict[int, dict[str, list[torch.Tensor]]] = {}

    def add(self, indexer: Indexer, **values: torch.Tensor) -> None:
        found = self.parts.setdefault(id(indexer), {"keys": [], "queries": [], "weights": []})
        for name, value in values.items():
            found[name].append(value.clone())

    def layers(self) -> list[Scored]:
        """One a layer; empties the listener."""
        found = [Scored(**{name: torch.cat(parts) for name, parts in layer.items()}) for layer in self.parts.values()]
        self.parts.clear()
        return found


@contextmanager
def _listening(listener: _Listener) -> Iterator[None]:
    """Every index key and query of the torch path is noted while the block runs. The cache must not be FP8 or FP4."""
    rotated, weigh = Indexer._rotated, Indexer.head_weights

    def noted(self: Indexer, values: torch.Tensor, turn: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        turned = rotated(self, values, turn, cache)
        listener.add(self, **{"keys" if values.ndim == 2 else "queries": turned})
        return turned

    def weighed(self: Indexer, x: torch.Tensor) -> torch.Tensor:
        weights = weigh(self, x)
        listener.add(self, weights=weights)
        return weights

    Indexer._rotated, Indexer.head_weights = noted, weighed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Indexer._rotated, Indexer.head_weights = rotated, weigh  # type: ignore[method-assign]


def heldout_ids(llm: Any) -> list[int]:
    """Tokens of the embedded model's held-out text."""
    ids: list[int] = llm.engine.tokenizer.encode((TINY / "eval" / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False)
    return ids


def of_tiny(length: int, texts: int) -> list[list[Scored]]:
    """Keys and queries of every layer of the embedded model, for each of the first ``texts`` parts of ``length`` tokens of held-out text.

    Raises:
        ValueError: there is not so much text.
    """
    from ....engine.llm import LLM
    from ....engine.sampling_params import SamplingParams

    settings = {
        "dtype": "float32",
        "attention_backend": "torch",
        "device": "cpu",
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    listener, found = _Listener(), []
    # in one chunk: a chunk in which every key is visible makes no queries
    with LLM("tiny", max_num_seqs=1, max_num_batched_tokens=length + 1, **settings) as llm:
        ids = heldout_ids(llm)
        if length * texts > len(ids):
            raise ValueError(f"{texts} texts of {length} tokens are more than the {len(ids)} tokens of held-out text")
        for number in range(texts):
            with _listening(listener):
                prompt = [0, *ids[number * length : (number + 1) * length - 1]]
                llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
            found.append(listener.layers())
    return found
