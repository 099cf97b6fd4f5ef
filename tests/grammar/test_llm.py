"""The offline API with the embedded model: every kind of form, what they do to the ends of requests, and layouts."""

from __future__ import annotations

import json
import re

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.grammar.guides import Guides
from rorqual.engine.grammar.structured import StructuredOutputsParams
from rorqual.engine.request import Request
from tests.ranks import run_ranks

pytest.importorskip("xgrammar")

ARGS = {"dtype": "float32", "disable_log_stats": True, "max_num_seqs": 8, "max_total_tokens": 16384, "max_model_len": 512}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
}
FORMS = [
    {"json": SCHEMA, "disable_any_whitespace": True}, {"regex": r"[a-z]{3}-\d{2}"}, {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'root ::= "<" word ">"\nword ::= [a-z] | [a-z] word'}, {"json": json.dumps({"enum": [1, "two", None]})},
]  # fmt: skip
PROMPTS = ["In the beginning", "ROMEO.\n", "Emma was", "To be", "The"]


def kept(form: dict, text: str) -> bool:
    """Whether a finished text has its form, by other means than a grammar."""
    if form.get("json") is SCHEMA:
        value = json.loads(text)
        return list(value) == ["name", "age"] and len(value["name"]) <= 8 and 0 <= value["age"] <= 120
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "grammar" in form:
        return re.fullmatch("<[a-z]+>", text) is not None
    return text in form.get("choice", ["1", '"two"', "null"])


def asked(form: dict | None, i: int, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9 if i % 2 else 0.0, "seed": i, "max_tokens": 60, "structured_outputs": form, **more})


def generate(llm: LLM, forms=FORMS) -> list[tuple[list[int], str | None]]:
    params = [asked(form, i) for i, form in enumerate(forms)] + [asked(None, 9, max_tokens=20)]
    outputs = llm.generate([*PROMPTS[: len(forms)], "Once"], params, use_tqdm=False)
    for form, output in zip(forms, outputs, strict=False):
        one = output.outputs[0]
        assert one.finish_reason == "length" or (one.finish_reason == "stop" and kept(form, one.text)), one
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def tiny():
    with LLM("tiny", **ARGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def serial():
    with LLM("tiny", **ARGS, disable_overlap_schedule=True) as llm:
        return generate(llm)


def test_every_form_is_kept_and_overlap_changes_nothing(tiny, serial):
    found = generate(tiny)
    assert found == serial and sum(reason == "stop" for _, reason in found) >= 4
    tiny.engine.leader.scheduler.check()


def test_a_token_is_the_best_of_those_that_the_grammar_has(tiny):
    """Greedy: every likelier token of the raw distribution is one that the grammar does not have there."""
    form = {"regex": r"[a-z]{3}-\d{2}"}
    one = tiny.generate(["To be"], asked(form, 0, logprobs=64), use_tqdm=False)[0].outputs[0]
    engine = tiny.engine
    guides = Guides(engine.tokenizer, engine.model_config.vocab_size, engine.model_config.eos_token_ids)
    grammar = engine.front.grammars.compile(StructuredOutputsParams(**form))
    request = Request(request_id="r", index=0, prompt_ids=[1], params=SamplingParams(), grammar=grammar)
    guides.enter(request)
    for token, row in zip(one.token_ids, one.logprobs, strict=True):
        better = [t for t, entry in row.items() if entry.rank < row[token].rank]
        matcher = guides._matchers["r"]._inner
        for other in better:
            assert not matcher.accept_token(other), (token, other)
        assert guides.accept(request, token)[1] is None


def test_completions_of_one_prompt_each_keep_the_form(tiny):
    outputs = tiny.generate(["Emma"], asked({"regex": "[a-z]{6}"}, 1, n=5, temperature=1.5), use_tqdm=False)[0].outputs
    texts = [o.text for o in outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts) and len(set(texts)) > 1


def test_the_end_of_the_form_is_the_end(tiny):
    eos = tiny.engine.model_config.eos_token_ids[0]
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 40}):
        one = tiny.generate(["Emma"], asked({"choice": ["yes"]}, 0, **more), use_tqdm=False)[0].outputs[0]
        assert (one.text, one.finish_reason, one.stop_reason, one.token_ids[-1]) == ("yes", "stop", None, eos), more
    long = asked({"regex": "a{30,40}"}, 0, min_tokens=3, max_tokens=6)
    one = tiny.generate(["Emma"], long, use_tqdm=False)[0].outputs[0]
    assert one.finish_reason == "length" and set(one.text) == {"a"}
    one = tiny.generate(["Emma"], asked({"regex": "abcd"}, 0, stop=["bc"]), use_tqdm=False)[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("a", "stop", "bc")
    one = tiny.generate(["Emma"], asked({"choice": ["<|User|>"]}, 0), use_tqdm=False)[0].outputs[0]
    assert one.text == "<|User|>" and len(one.token_ids) > 2  # spelled, not the special token


def test_pressure_on_pages_changes_nothing(serial):
    with LLM("tiny", **{**ARGS, "max_total_tokens": 512, "page_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 3}) as llm:
        preempt, count = llm.engine.leader.scheduler.preempt, 0
        for i, tick in enumerate(iter_ticks(llm)):
            if i % 7 == 3:
                count += any(preempt(request.request_id) for request in llm.engine.leader.scheduler.running_requests()[-1:])
            if tick:
                break
        assert llm.found == serial and count > 3


def iter_ticks(llm: LLM):
    """Yields after every step of a ``generate`` call; True after the last, with the result in ``llm.found``."""
    import threading

    steps, go, done = threading.Semaphore(0), threading.Semaphore(0), []
    tick = llm.engine.leader.tick

    def stepping(commands, *, more):
        found = tick(commands, more=more)
        steps.release()
        assert go.acquire(timeout=60)
        return found

    llm.engine.leader.tick = stepping

    def work():
        try:
            llm.found = generate(llm)
        finally:
            done.append(True)
            steps.release()

    thread = threading.Thread(target=work)
    thread.start()
    while not done:
        assert steps.acquire(timeout=60)
        yield bool(done)
        go.release()
    thread.join(60)


@pytest.mark.parametrize("wrong", [
    ({"regex": "a("}, "Regex parsing error"), ({"json": "{"}, "not valid JSON"), ({"json": {"type": "x"}}, "names 'x'"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"), ({"grammar": "x"}, "EBNF"), ({"choice": []}, "choice"),
    ({}, "exactly one of"), ({"regex": "a", "choice": ["b"]}, "exactly one of"), ({"rule": "a"}, "unknown fields"), (["regex"], "must be"),
])  # fmt: skip
def test_wrong_forms_are_refused_by_name_and_the_engine_goes_on(tiny, wrong):
    form, message = wrong
    with pytest.raises(ValueError, match=message):
        tiny.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=form)], use_tqdm=False)
    assert tiny.generate(["a"], SamplingParams(max_tokens=1), use_tqdm=False)


def rank_run(layout: dict) -> list:
    with LLM("tiny", **ARGS, **layout) as llm:
        found = generate(llm) if llm.is_rank0 else [llm.generate(PROMPTS, use_tqdm=False)]
        if llm.engine.leader is not None:
            llm.engine.leader.scheduler.check()
        return found


def test_stages_change_nothing(serial):
    """The rank that samples is not the one that knows the grammar."""
    assert run_ranks(rank_run, 2, {"pipeline_parallel_size": 2}, timeout=240.0, env={"RORQUAL_DEBUG": "1"})[0] == serial
