"""What a server compiles before its first request is all that its prompts need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

#: of prompts on their own: ends of one page, less than a page, lengths that are multiples of nothing, more than one step
LENGTHS = (1, 7, 16, 17, 40, 64, 100, 129, 200, 333, 512, 777, 1500, 2048, 2500)


@pytest.mark.parametrize("rows", ["bfloat16", "fp8"])
def test_prompts_of_all_lengths_compile_nothing(rows, monkeypatch):
    import triton

    compiled: list[str] = []

    def heard(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        compiled.append(str(getattr(src, "name", src)))

    settings: dict[str, Any] = {"skip_tokenizer_init": True, "disable_log_stats": True, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
    with LLM("tiny", kv_cache_dtype=rows, max_model_len=4096, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        llm.generate([[5] * 8], params, use_tqdm=False)  # the head, and what samples
        assert llm.engine.warm_up() > 0.0
        monkeypatch.setattr(triton.knobs.compilation, "listener", heard)
        vocab, found = llm.engine.model_config.vocab_size, {}
        for number, length in enumerate(LENGTHS):
            prompt = [(7 * number + 3 * i) % (vocab - 8) + 5 for i in range(length)]
            for cached in (False, True):
                before = len(compiled)
                llm.generate([prompt], params, use_tqdm=False)
                found[length, cached] = compiled[before:]
    assert {case: names for case, names in found.items() if names} == {}
