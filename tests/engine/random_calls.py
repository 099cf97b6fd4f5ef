"""One call of the real engine with random requests, priorities, aborts and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from rorqual import LLM, SamplingParams


def check_random_call(
    data: st.DataObject, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, alone: Callable[[int], list[int]]
) -> None:
    """Every request ends with the tokens of a lone run, those of ``alone(place)``, or with the first of them if it was aborted."""
    scheduler = llm.engine.leader.scheduler
    places = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=8))
    priorities = data.draw(st.lists(st.integers(0, 2), min_size=len(places), max_size=len(places)))
    doomed = data.draw(st.dictionaries(st.integers(0, len(places) - 1), st.integers(1, params.max_tokens), max_size=3))
    pushed = data.draw(st.sets(st.integers(0, 40), max_size=6))
    seen: dict[int, int] = {}
    outputs = {}
    for step, chunk in enumerate(llm.generate_stream([prompts[p] for p in places], params, priority=priorities)):
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
