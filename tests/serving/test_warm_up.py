"""Who decides whether a server compiles kernels before its first request."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rorqual import LLM
from rorqual.engine.serving.settings import ServeSettings
from rorqual.launch.serve import _warm_up
from tests.checkpoints import checkpoint
from tests.ranks import run_ranks


def warmed(folder: str, skips: list[bool]) -> list[bool]:
    """What this rank was told to compile, where its own flag is one of ``skips``."""
    found: list[bool] = []
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 4}
    with LLM(folder, data_parallel_size=len(skips), **settings) as llm:
        llm.engine.warm_up = lambda: found.append(True) or 0.0  # type: ignore[method-assign, func-returns-value]
        _warm_up(llm, ServeSettings(skip_server_warmup=skips[int(os.environ.get("RANK", "0"))]))
    return found


@pytest.mark.parametrize("skips", [[True, False], [False, True]])
def test_all_ranks_do_as_rank_0_is_told(skips):
    """Its steps are collective: ranks whose hosts have other flags would wait for each other until the deadline."""
    assert run_ranks(warmed, 2, str(checkpoint("v32")), skips) == [[] if skips[0] else [True]] * 2


def test_one_rank():
    assert warmed(str(checkpoint("v32")), [True]) == [] and warmed(str(checkpoint("v32")), [False]) == [True]
