"""The real engine under random arrivals, priorities, aborts and preemptions: every request ends with the tokens of a lone run."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual import LLM, SamplingParams
from tests.checkpoints import checkpoint
from tests.engine.parity import ragged_prompts
from tests.engine.random_calls import check_random_call

PROMPTS = ragged_prompts(12, longest=70)
N_TOKENS = 10


@functools.cache
def engine(overlap: bool) -> LLM:
    """A pool of 160 tokens for up to 5 requests of up to 80: nearly always short of pages."""
    return LLM(
        str(checkpoint("v32")),
        skip_tokenizer_init=True,
        dtype="float32",
        disable_log_stats=True,
        page_size=4,
        max_total_tokens=160,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        disable_overlap_schedule=not overlap,
    )


@functools.cache
def alone(place: int) -> list[int]:
    output = engine(False).generate([PROMPTS[place]], params(), use_tqdm=False)[0]
    return output.outputs[0].token_ids


def params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("overlap", [True, False])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_calls_end_with_the_tokens_of_a_lone_run(overlap, data):
    llm = engine(overlap)
    check_random_call(data, llm, PROMPTS, params(), alone)
    scheduler = llm.engine.leader.scheduler
    scheduler.check()
    assert scheduler.idle
