"""The real engine under random arrivals, priorities, aborts and preemptions: every request ends with the tokens of a lone run."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual import LLM, SamplingParams
from tests.checkpoints import checkpoint
from tests.engine.parity import ragged_prompts

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
    scheduler = llm.engine.leader.scheduler
    places = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=8))
    priorities = data.draw(st.lists(st.integers(0, 2), min_size=len(places), max_size=len(places)))
    doomed = data.draw(st.dictionaries(st.integers(0, len(places) - 1), st.integers(1, N_TOKENS), max_size=3))
    pushed = data.draw(st.sets(st.integers(0, 40), max_size=6))
    seen: dict[int, int] = {}
    outputs = {}
    for step, chunk in enumerate(llm.generate_stream([PROMPTS[p] for p in places], params(), priority=priorities)):
        seen[chunk.prompt_index] = seen.get(chunk.prompt_index, 0) + len(chunk.token_ids)
        if doomed.get(chunk.prompt_index) == seen[chunk.prompt_index] and not chunk.finished:
            llm.abort(chunk.request_id)
        if step in pushed:
            for request in scheduler.running_requests()[:1]:
                scheduler.preempt(request.request_id)
        if chunk.output is not None:
            outputs[chunk.prompt_index] = chunk.output.outputs[0]
    assert sorted(outputs) == list(range(len(places)))
    for index, output in outputs.items():
        expected = alone(places[index])
        if output.finish_reason == "abort":
            assert index in doomed and output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.finish_reason == "length" and output.token_ids == expected
    scheduler.check()
    assert scheduler.idle
