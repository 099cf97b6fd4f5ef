"""Steps of few tokens, whose work runs on two queues in graphs, against the same steps launched one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.weights.convert import convert_fp8
from tests.checkpoints import TINY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("requests", [1, 4])
def test_graphs_of_fp8_weights_keep_the_tokens_of_eager_steps(tmp_path: Path, requests: int) -> None:
    """Batches as large as the graphs, so that both launch the same shapes; contexts of more keys than are chosen."""
    folder = tmp_path / "tiny-fp8"
    convert_fp8(TINY, folder)
    prompts = [{"prompt_token_ids": [5 + (11 * r + 7 * i) % 2000 for i in range(1500)]} for r in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "kv_cache_dtype": "fp8", "skip_tokenizer_init": True, "disable_log_stats": True, "max_num_seqs": requests,
        "max_model_len": 4096, "max_num_batched_tokens": 8192, "cuda_graph_bs": [requests],
    }  # fmt: skip
    found: dict[bool, list[list[list[int]]]] = {}
    for eager in (True, False):
        with LLM(str(folder), enforce_eager=eager, **settings) as llm:
            assert llm.engine.stage.model.config.attention.indexer.topk < 1500
            found[eager] = []
            for _ in range(3):
                llm.reset_prefix_cache()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found[eager].append([list(output.outputs[0].token_ids) for output in outputs])
            assert eager or llm.engine.runner.stats.graph_steps > 100
    assert found[False] == found[True] and found[True][0] == found[True][1]
