"""Prompts and runs that the layout, scheduling and oracle tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

N_PROMPTS = 64
N_TOKENS = 64
VOCAB = 512


def ragged_prompts(count: int = N_PROMPTS, *, longest: int = 100, vocab: int = VOCAB) -> list[list[int]]:
    """Token-id prompts of length 1 to ``longest``; a quarter of them share a prefix of 40 tokens."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(3, vocab, (40,), generator=generator).tolist()
    prompts = []
    for i in range(count):
        length = 1 + (i * (longest - 1)) // max(1, count - 1)
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        prompts.append((shared + ids)[:length] if i % 4 == 3 and length > 41 else ids)
    return prompts


def greedy_tokens(
    folder: Path | str, *, prompts: list[list[int]] | None = None, n: int = N_TOKENS, check: Any = None, **engine_args: Any
) -> list[list[int]]:
    """Greedy continuations through ``LLM``; [] on ranks other than 0. ``check(llm)`` runs before it closes, on every rank."""
    from rorqual import LLM, SamplingParams

    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 64}
    with LLM(str(folder), **{**settings, **engine_args}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        outputs = llm.generate(ragged_prompts() if prompts is None else prompts, params, use_tqdm=False)
        if check is not None:
            check(llm)
        return [o.outputs[0].token_ids for o in outputs]


def rank_tokens(folder: str, engine_args: dict[str, Any], prompts: list[list[int]] | None = None, n: int = N_TOKENS) -> list[list[int]]:
    """``greedy_tokens`` as the job of one rank (for ``run_ranks``)."""
    torch.set_num_threads(1)
    return greedy_tokens(folder, prompts=prompts, n=n, **engine_args)
