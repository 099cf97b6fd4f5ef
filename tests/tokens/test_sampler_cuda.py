from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.engine.sampling.noise import uniform
from rorqual.engine.sampling.sampler import sample
from rorqual.engine.sampling.sampler_table import SamplerTable, param_floats, param_ints
from rorqual.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_noise_is_the_same_on_both_devices() -> None:
    seeds, positions = torch.randint(0, 2**62, (4096,)), torch.randint(0, 2**20, (4096,))
    assert torch.equal(uniform(seeds, positions), uniform(seeds.cuda(), positions.cuda()).cpu())


def test_tokens_are_the_same_on_both_devices() -> None:
    n, vocab = 48, 4096
    kinds = [{"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.8, "min_p": 0.01}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.5}]
    params = [SamplingParams(logprobs=3, **kinds[i % len(kinds)]) for i in range(n)]  # type: ignore[arg-type]
    ids = torch.randint(0, vocab, (n, 32), dtype=torch.int32)
    ints = np.array([param_ints(p, slot=i, length=32, prompt_len=16, seed=i) for i, p in enumerate(params)], dtype=np.int64)
    logits, slots, lengths = torch.randn(n, vocab) * 4, torch.arange(n), torch.full((n,), 32)
    results = []
    for device in ("cpu", "cuda"):
        table = SamplerTable(n, device, debug=True)
        table.set(ints, np.array([param_floats(p) for p in params]))
        args = [x.to(device) for x in (logits, slots, lengths)]
        results.append(sample(*args, table, ids.to(device), args[2], host_slots=np.arange(n, dtype=np.int32)))
    assert torch.equal(results[0].tokens, results[1].tokens.cpu())
    assert results[0].logprobs is not None and results[1].logprobs is not None
    assert torch.equal(results[0].logprobs.top_ids, results[1].logprobs.top_ids.cpu())
    torch.testing.assert_close(results[0].logprobs.logprob, results[1].logprobs.logprob.cpu())
