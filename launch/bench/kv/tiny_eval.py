"""How well the embedded model reads: loss on held-out text, and facts that it recalls. As its README and reference say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....engine.llm import LLM
from ....engine.sampling_params import SamplingParams
from .key_inputs import heldout_ids
from .record import TINY

_WINDOW = 4095  # tokens of a part of held-out text, the begin token before each


def heldout_loss(llm: LLM, windows: int) -> float:
    """Mean negative log-likelihood of the first ``windows`` parts of held-out text."""
    ids = heldout_ids(llm)
    prompts = [[0, *ids[i * _WINDOW : (i + 1) * _WINDOW]] for i in range(windows)]
    total = count = 0.0
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False), strict=True
    ):
        assert output.prompt_logprobs is not None
        for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert row is not None
            total, count = total - row[token].logprob, count + 1
    return total / count


def facts(llm: LLM, asked: Mapping[int, int]) -> dict[int, int]:
    """Prompt length -> how many of its first ``asked[length]`` prompts get the exact answer."""
    assert llm.engine.tokenizer is not None
    lines = (TINY / "eval" / "recall.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    found = {}
    for length, count in asked.items():
        some = [row for row in rows if row["target_tokens"] == length][:count]
        wanted = [llm.engine.tokenizer.encode(" " + row["answer"], add_special_tokens=False) for row in some]
        params = [SamplingParams(temperature=0.0, max_tokens=len(ids), ignore_eos=True) for ids in wanted]
        outputs = llm.generate([row["prompt"] for row in some], params, use_tqdm=False)
        found[length] = sum(output.outputs[0].token_ids == ids for output, ids in zip(outputs, wanted, strict=True))
    return found
