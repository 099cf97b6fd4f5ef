"""The engine against transformers, in fp32, for every model family."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import NAMES, checkpoint, hf_logits, hf_model, stable_indexer
from tests.engine.parity import greedy_tokens, ragged_prompts


def engine_logits(llm, prompts):
    """Logits of every prompt position in one ragged prefill: list of [len, vocab]."""
    import numpy as np

    from rorqual.attention.batch import AttentionBatch

    engine = llm.engine
    page, tables = engine.config.page_size, engine.runner.tables
    counts = np.array([len(p) for p in prompts])
    pages_each = -(-counts // page)
    table = torch.full((len(prompts), int(pages_each.max())), tables.dummy_page, dtype=torch.int32)
    free = torch.randperm(int(pages_each.sum()), generator=torch.Generator().manual_seed(3)).int()  # physical order is shuffled
    at = 0
    for row, n in enumerate(pages_each.tolist()):
        table[row, :n] = free[at : at + n]
        at += n
    with torch.inference_mode():
        batch = AttentionBatch.build(np.zeros_like(counts), counts, table, page, torch.device("cpu"))
        model = engine.stage.model
        x, _ = model(model.embed(torch.tensor([t for p in prompts for t in p])), batch, engine.runner.cache)
        return list(model.logits(x).split(counts.tolist()))


@pytest.mark.parametrize("name", NAMES)
def test_prefill_logits_and_greedy_tokens_equal_transformers(name):
    from rorqual import LLM

    folder = checkpoint(name)
    oracle = hf_model(folder)
    if "v32" in name or "glm" in name:
        oracle = stable_indexer(oracle)
    prompts = ragged_prompts()
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", disable_log_stats=True) as llm:
        mine = engine_logits(llm, prompts)
    worst = max(float((a - hf_logits(oracle, p)).abs().max()) for a, p in zip(mine, prompts, strict=True))
    assert worst <= 2e-5, f"prefill logits differ by {worst:.2e}"

    tokens = greedy_tokens(folder, prompts=prompts)
    for prompt, found in zip(prompts, tokens, strict=True):
        # One pass over prompt and continuation: each token must be the oracle's choice given the true past.
        logits = hf_logits(oracle, prompt + found[:-1])[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == found
