"""Two of the random lives of ``tests.offload.seeds`` on CUDA, eagerly and from graphs."""

from __future__ import annotations

import pytest
import torch

from tests.offload.seeds import Job, run_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")]


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_random_lives_keep_tokens(policy, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")  # what is free holds NaN
    torch.backends.cuda.matmul.allow_tf32 = False
    eager, graphs = run_job(Job(seeds=(0,), modes=("eager", "graphs"), steps=120, device="cuda", policy=policy, prompts=10))
    assert eager["status"] == graphs["status"] == "passed", (eager, graphs)
    assert graphs["graph steps"] > 30 and not eager["graph steps"]
    assert all(row["misses"] and row["drops"] and not row["unwritten"] for row in (eager, graphs))
