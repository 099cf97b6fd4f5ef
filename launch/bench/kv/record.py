"""Selections of a real model, recorded: what the embedded model's indexers score and choose while it continues a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ....attention import indexer
from ....attention.mla import layer_has_indexer
from .traces import Selection

TINY = Path(__file__).resolve().parents[2] / "tiny"
Trace = list[Selection]
_SEAM = "select_topk"  # name in ``attention.indexer`` of what chooses by scores


class Recorder:
    """Keeps the scores and choices of every step of one request, layer by layer."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.selections: list[Selection] = []  # layers of a step in turn

    def see(self, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """Scores [n, positions] and choices [n, k] of one call; kept if it is of a decode step."""
        if scores.shape[0] == 1 and scores.shape[1] > self.prompt_tokens:
            self.selections.append(Selection(scores[0].float().numpy().copy(), chosen[0].numpy().copy()))

    def traces(self, layers: int) -> list[Trace]:
        """One trace a layer."""
        return [self.selections[layer::layers] for layer in range(layers)]


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Every selection of the torch path passes through ``recorder`` while the block runs."""
    select = getattr(indexer, _SEAM)

    def seen(scores: torch.Tensor, limit: torch.Tensor, k: int) -> torch.Tensor:
        chosen: torch.Tensor = select(scores, limit, k)
        recorder.see(scores, chosen)
        return chosen

    setattr(indexer, _SEAM, seen)
    try:
        yield
    finally:
        setattr(indexer, _SEAM, select)


def record(*, prompt_tokens: int = 3000, steps: int = 200) -> list[Trace]:
    """A trace for each layer of the embedded model that has an indexer, over ``steps`` tokens that continue held-out text.

    Raises:
        ValueError: prompt and steps do not fit the model, or leave nothing to choose.
    """
    from ....engine.llm import LLM
    from ....engine.sampling_params import SamplingParams

    settings = {"dtype": "float32", "attention_backend": "torch", "device": "cpu", "enforce_eager": True, "disable_log_stats": True}
    with LLM("tiny", **settings) as llm:
        config = llm.engine.model_config
        assert config.attention.indexer is not None
        longest, k = config.max_position, config.attention.indexer.topk
        if prompt_tokens <= k or prompt_tokens + steps >= longest:
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens and {steps} steps cannot be recorded: give more than {k} tokens of prompt, "
                f"and fewer than {longest} in all"
            )
        assert llm.engine.tokenizer is not None
        text = (TINY / "eval" / "heldout.txt").read_text(encoding="utf-8")
        ids = llm.engine.tokenizer.encode(text, add_special_tokens=False)
        recorder = Recorder(prompt_tokens)
        with recording(recorder):
            params = SamplingParams(temperature=1.0, seed=0, max_tokens=steps + 1, ignore_eos=True)  # greedy text runs in circles
            llm.generate([{"prompt_token_ids": ids[:prompt_tokens]}], params, use_tqdm=False)
        layers = sum(layer_has_indexer(config.attention, number) for number in range(config.n_layers))
    return recorder.traces(layers)


def save(traces: list[Trace], path: Path) -> None:
    """Write traces of equal length to a compressed npz file."""
    longest = max(len(selection.scores) for trace in traces for selection in trace)
    scores = np.full((len(traces), len(traces[0]), longest), np.nan, np.float32)
    for layer, trace in enumerate(traces):
        for step, selection in enumerate(trace):
            scores[layer, step, : len(selection.scores)] = selection.scores
    chosen = np.array([[selection.chosen for selection in trace] for trace in traces], np.int32)
    contexts = np.array([len(selection.scores) for selection in traces[0]], np.int32)
    np.savez_compressed(path, scores=scores, chosen=chosen, contexts=contexts)


def load(path: Path) -> list[Trace]:
    """The inverse of ``save``.

    Raises:
        ValueError: the file is none of ``save``'s.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            scores, chosen, contexts = file["scores"], file["chosen"].astype(np.int64), file["contexts"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is no recorded trace ({error}); make one with `rorqual bench kv policy --save-recorded FILE`") from None
    return [
        [Selection(scores[layer, step, : contexts[step]], chosen[layer, step]) for step in range(len(contexts))]
        for layer in range(len(scores))
    ]
