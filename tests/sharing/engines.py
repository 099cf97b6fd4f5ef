"""Small engines on one pool file with a prefix directory, and what must be true of them."""

from __future__ import annotations

from pathlib import Path

from rorqual import LLM
from rorqual.engine.offload import host_share
from tests.offload.engines import PROMPTS, alone, counters, make, params

PLACES = (2, 5, 9, 11)
SOME = [PROMPTS[one] for one in PLACES]
LONG = PROMPTS[11]


def expected() -> list[list[int]]:
    return [alone(one) for one in PLACES]


def shared(folder: Path, policy: str = "hybrid", **settings) -> LLM:
    """An engine on the pool file in ``folder``."""
    pool = {"kv_host_backing": "file", "kv_host_path": str(folder / "pool"), "kv_prefix_directory": True, "kv_host_memory": 0.04}
    return make(policy, **{**pool, **settings})


def share_of(llm: LLM):
    return llm.engine.leader.scheduler.share


def tokens(llm: LLM, prompts=SOME, n: int = 12) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params(n), use_tqdm=False)]


def cached(llm: LLM, prompt: list[int]) -> int:
    """Tokens of ``prompt`` that a request finds."""
    return llm.generate([prompt], params(1), use_tqdm=False)[0].metrics.cached_tokens


def expect_whole(*engines: LLM) -> None:
    """Books agree once everything under way has ended."""
    for llm in engines:
        assert share_of(llm).flush()
    for llm in engines:
        leader = llm.engine.leader
        with leader.at_work:
            leader.scheduler.check()
            assert leader.scheduler.idle and share_of(llm).pages.n_used == leader.scheduler._pool.pages.n_used
        share_of(llm).directory.check()
        assert counters(llm)["unwritten"] == 0


def small(monkeypatch, pages: int) -> None:
    """Pools of so few pages."""
    monkeypatch.setattr(host_share, "host_pages_of", lambda *a, **k: pages)
