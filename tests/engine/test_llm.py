"""The offline API: streaming, stops, log-probabilities, several completions, aborts, sampling over layouts, reports."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams
from tests.checkpoints import checkpoint
from tests.engine.parity import ragged_prompts
from tests.ranks import run_ranks

TINY_ARGS = {"dtype": "float32", "disable_log_stats": True, "max_num_seqs": 16, "max_total_tokens": 16384}
ARGS = {**TINY_ARGS, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def tiny():
    with LLM("tiny", **TINY_ARGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids():
    with LLM(str(checkpoint("v32")), page_size=4, **ARGS) as llm:
        yield llm


def greedy(n: int = 16, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True, **changes})


def test_streamed_pieces_add_up_to_the_output(tiny):
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    outputs = {}
    prompts = ["In the beginning", "ROMEO.\n", "Emma was"]
    for chunk in tiny.generate_stream(prompts, SamplingParams(temperature=0.9, seed=1, max_tokens=24, n=2)):
        key = (chunk.prompt_index, chunk.index)
        texts[key] = texts.get(key, "") + chunk.text
        tokens.setdefault(key, []).extend(chunk.token_ids)
        if chunk.output is not None:
            outputs[chunk.prompt_index] = chunk.output
    assert sorted(outputs) == [0, 1, 2]
    for place, output in outputs.items():
        assert output.prompt == prompts[place] and output.finished
        for one in output.outputs:
            assert texts[place, one.index] == one.text == tiny.engine.tokenizer.decode(one.token_ids)
            assert tokens[place, one.index] == one.token_ids
        assert output.outputs[0].token_ids != output.outputs[1].token_ids


def test_stop_string_over_token_borders_ends_the_text_before_it(tiny):
    whole = tiny.generate(["In the beginning"], greedy(48), use_tqdm=False)[0].outputs[0].text
    for start in range(5, 40, 7):
        stop = whole[start : start + 6]
        output = tiny.generate(["In the beginning"], greedy(48, stop=[stop]), use_tqdm=False)[0].outputs[0]
        assert output.text == whole[: whole.index(stop)] and output.finish_reason == "stop" and output.stop_reason == stop
        kept = tiny.generate(["In the beginning"], greedy(48, stop=stop, include_stop_str_in_output=True), use_tqdm=False)[0].outputs[0]
        assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_end_token_stop_token_and_length(tiny):
    chat = tiny.chat([{"role": "user", "content": "What is your name?"}], SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)[0]
    assert chat.outputs[0].finish_reason == "stop" and chat.outputs[0].stop_reason is None and chat.outputs[0].token_ids[-1] == 1
    assert chat.outputs[0].text and "<|end|>" not in chat.outputs[0].text
    first = tiny.generate(["Emma was"], greedy(8), use_tqdm=False)[0].outputs[0]
    assert first.finish_reason == "length" and len(first.token_ids) == 8
    third = first.token_ids[2]
    cut = tiny.generate(["Emma was"], greedy(8, stop_token_ids=[third]), use_tqdm=False)[0].outputs[0]
    assert cut.finish_reason == "stop" and cut.stop_reason == third
    assert cut.token_ids == first.token_ids[: first.token_ids.index(third) + 1]


def test_minimum_length_holds_the_end_back(tiny):
    params = SamplingParams(temperature=0.0, max_tokens=60, min_tokens=30)
    output = tiny.chat([{"role": "user", "content": "What is your name?"}], params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) >= 30 and 1 not in output.token_ids[:30]


def test_logprobs_are_those_of_a_second_look(ids):
    """Output log-probabilities equal the prompt log-probabilities of prompt + output, cold or with a warm prefix cache."""
    prompt = ragged_prompts(8)[5]
    out = ids.generate([prompt], greedy(12, logprobs=3), use_tqdm=False)[0].outputs[0]
    assert len(out.logprobs) == 12
    for _ in range(2):
        again = ids.generate([prompt + out.token_ids], greedy(1, prompt_logprobs=2), use_tqdm=False)[0]
        assert again.metrics.cached_tokens == 0
        rows = again.prompt_logprobs
        assert rows[0] is None and len(rows) == len(prompt) + 12
        for token, mine, theirs in zip(out.token_ids, out.logprobs, rows[len(prompt) :], strict=True):
            assert math.isclose(mine[token].logprob, theirs[token].logprob, abs_tol=2e-5)
            assert mine[token].rank == theirs[token].rank == 1
            assert len(mine) == 3 and len(theirs) == 2
    assert math.isclose(out.cumulative_logprob, sum(row[t].logprob for t, row in zip(out.token_ids, out.logprobs, strict=True)))


def test_prompt_logprobs_do_not_depend_on_chunks():
    prompt = ragged_prompts(8)[7]
    found = []
    for chunk in (4096, 7):
        with LLM(str(checkpoint("v32")), max_num_batched_tokens=chunk, **ARGS) as llm:
            rows = llm.generate([prompt], greedy(1, prompt_logprobs=1), use_tqdm=False)[0].prompt_logprobs
            found.append([row[token].logprob for token, row in zip(prompt[1:], rows[1:], strict=True)])
    assert found[0] == pytest.approx(found[1], abs=2e-5)


def test_abort_one_of_many_at_every_step(ids):
    prompts = ragged_prompts(6, longest=60)
    whole = [o.outputs[0].token_ids for o in ids.generate(prompts, greedy(), use_tqdm=False)]
    for victim_step in range(0, 13, 3):
        outputs, seen = {}, 0
        for chunk in ids.generate_stream(prompts, greedy()):
            if chunk.prompt_index == 2 and not chunk.finished:
                seen += 1
                if seen == victim_step + 1:
                    ids.abort(chunk.request_id)
            if chunk.output is not None:
                outputs[chunk.prompt_index] = chunk.output.outputs[0]
        assert outputs[2].finish_reason == "abort"
        assert outputs[2].token_ids == whole[2][: len(outputs[2].token_ids)] and len(outputs[2].token_ids) > victim_step
        assert [outputs[i].token_ids for i in (0, 1, 3, 4, 5)] == [whole[i] for i in (0, 1, 3, 4, 5)]
        ids.engine.leader.scheduler.check()
        assert ids.engine.leader.scheduler.idle


def test_leaving_a_stream_early_ends_its_requests(ids):
    stream = ids.generate_stream(ragged_prompts(4), greedy(64))
    next(stream)
    stream.close()
    assert ids.engine.leader.scheduler.idle and not ids.engine.front.open
    ids.engine.leader.scheduler.check()
    assert len(ids.generate([[5]], greedy(3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_leaving_a_stream_when_others_end_in_the_same_step(ids):
    stream = ids.generate_stream([[5], [6], [7]], greedy(1))
    assert next(stream).finished
    stream.close()
    assert ids.engine.leader.scheduler.idle and not ids.engine.front.open
    assert len(ids.generate([[5], [6]], greedy(3), use_tqdm=False)) == 2


def test_unknown_request_ids_are_ignored(ids):
    ids.abort("nobody")
    assert ids.generate([[5]], greedy(2), use_tqdm=False)[0].finished


def test_the_largest_numbers_are_no_trouble():
    many = 2**63 - 1
    with LLM(str(checkpoint("v32")), **ARGS, max_model_len=24) as llm:
        output = llm.generate([[5]], SamplingParams(max_tokens=many, min_tokens=many), priority=[many], use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 23


@pytest.mark.parametrize("messages", [{"role": "user", "content": "x"}, "x", 5])
def test_messages_that_are_no_list_are_refused(tiny, messages):
    with pytest.raises(ValueError, match='messages must be a list of dicts with "role" and "content", or a list of such lists, found '):
        tiny.chat(messages, use_tqdm=False)


def test_a_call_that_was_broken_off_does_not_mix_with_another():
    """As by Ctrl-C in a notebook: its requests are still in the scheduler, and their outputs would be taken for the next call's."""
    with LLM(str(checkpoint("v32")), **ARGS) as llm:
        settle = llm.engine.leader._settle
        steps = []

        def interrupted(plan):
            settle(plan)
            steps.append(plan.step)
            if len(steps) == 3:
                raise KeyboardInterrupt

        llm.engine.leader._settle = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], greedy(8), use_tqdm=False)
        with pytest.raises(ValueError, match=r"an earlier call of this LLM ended in its middle \(KeyboardInterrupt: \); close it and make"):
            llm.generate([[7]], greedy(8), use_tqdm=False)


def test_priorities_decide_who_runs_first():
    with LLM(str(checkpoint("v32")), **{**ARGS, "max_num_seqs": 1}) as llm:
        order = [c.prompt_index for c in llm.generate_stream([[5], [6], [7]], greedy(2), priority=[2, 1, 0]) if c.output is not None]
    assert order == [2, 1, 0]


def sampled(folder: str, args: dict) -> list[list[int]]:
    torch.set_num_threads(1)
    with LLM(folder, **{**ARGS, **args}) as llm:
        params = [SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=i if i % 2 else None, max_tokens=16) for i in range(12)]
        outputs = llm.generate(ragged_prompts(12), params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]


LAYOUTS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}]


@pytest.mark.parametrize("args", LAYOUTS, ids=str)
def test_sampled_tokens_do_not_depend_on_the_layout(args):
    assert run_ranks(sampled, 2, str(checkpoint("v32")), args, timeout=120.0)[0] == sampled(str(checkpoint("v32")), {})


def fp8_payload(folder: str) -> list[list[int]]:
    torch.set_num_threads(1)
    with LLM(folder, data_parallel_size=2, moe_payload="fp8", **ARGS) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(ragged_prompts(12), greedy(8), use_tqdm=False)]


def test_fp8_dispatch_payload_stays_close(ids):
    """Eight bits for what crosses between ranks may change a close choice, not most of them."""
    mine = run_ranks(fp8_payload, 2, str(checkpoint("v32")), timeout=120.0)[0]
    exact = [o.outputs[0].token_ids for o in ids.generate(ragged_prompts(12), greedy(8), use_tqdm=False)]
    assert sum(a[0] == b[0] for a, b in zip(mine, exact, strict=True)) >= 9
    assert mine != [] and all(len(a) == 8 for a in mine)


def stop_early(folder: str) -> tuple[list[str], bool]:
    """Abort on replica 1 through rank 0, leave a stream early, then run another call: every rank stays in step."""
    torch.set_num_threads(1)
    with LLM(folder, data_parallel_size=2, **ARGS) as llm:
        reasons = []
        for chunk in llm.generate_stream(ragged_prompts(4), greedy(32)):
            if chunk.prompt_index == 1 and chunk.finished is False:
                llm.abort(chunk.request_id)
            if chunk.output is not None:
                reasons.append(f"{chunk.prompt_index}{chunk.output.outputs[0].finish_reason}")
        stream = llm.generate_stream(ragged_prompts(4), greedy(32))
        if llm.is_rank0:
            next(stream)
            stream.close()
        else:
            assert list(stream) == []
        done = llm.generate([[5], [6]], greedy(2), use_tqdm=False)
        return sorted(reasons), len(done) == (2 if llm.is_rank0 else 0) and llm.engine.leader.scheduler.idle


def test_aborts_and_early_ends_reach_other_replicas():
    results = run_ranks(stop_early, 2, str(checkpoint("v32")), timeout=120.0)
    assert results[0] == (["0length", "1abort", "2length", "3length"], True)
    assert results[1] == ([], True)


def busy(folder: str) -> dict:
    torch.set_num_threads(1)
    with LLM(folder, pipeline_parallel_size=2, enable_prefix_caching=False, **ARGS) as llm:
        llm.generate(ragged_prompts(16), greedy(24), use_tqdm=False)
        return llm.stats()


def test_both_pipeline_stages_are_busy_at_once():
    stats = run_ranks(busy, 2, str(checkpoint("v32", num_hidden_layers=6)), timeout=120.0)[0]
    first, second = (row["intervals"] for row in stats["ranks"])
    assert len(first) == len(second) > 24
    overlaps = sum(any(a0 < b1 and b0 < a1 and a != b for b, b0, b1 in second) for a, a0, a1 in first)
    assert overlaps > len(first) / 3, f"{overlaps} of {len(first)} steps of the first stage ran beside another step of the second"


def test_stats_count_tokens_and_loads_exactly():
    prompts = ragged_prompts(5)
    with LLM(str(checkpoint("v32")), enable_prefix_caching=False, disable_overlap_schedule=True, **ARGS) as llm:
        llm.generate(prompts, greedy(4), use_tqdm=False)
        stats = llm.stats()
    computed = sum(map(len, prompts)) + 5 * 3  # the last sampled token is never computed
    assert stats["ranks"][0]["tokens"] == computed and stats["ranks"][0]["samples"] == 20
    assert [sum(row) for row in stats["expert_load"]] == [0, computed * 4, computed * 4]


def test_nothing_is_imported_or_made_by_importing_the_package():
    import subprocess
    import sys

    code = "import sys, rorqual; assert 'torch' not in sys.modules, 'importing rorqual imports torch'"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, cwd=Path(__file__).parent)
