"""Bad input gets a named error on every rank; a rank that breaks ends all of them; nothing hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.checkpoints import checkpoint
from tests.ranks import collect_ranks, run_ranks

ARGS = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 8}


def make(folder: str, **args):
    from rorqual import LLM

    torch.set_num_threads(1)
    return LLM(folder, **{**ARGS, **args})


def greedy(n: int = 8):
    from rorqual import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


# ---- one rank


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len 5000 is more than the model's 1024 positions"),
        ({"page_size": 3}, "page_size 3 is not a power of two"),
        ({"expert_parallel_size": 3}, r"expert_parallel_size 3 does not fit dp 1 x tp 1; valid sizes: \[1\]"),
        ({"tensor_parallel_size": 2}, "makes 2 ranks, but the job has 1"),
        ({"skip_tokenizer_init": False}, "tokenizer"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
    ],
)
def test_bad_settings_are_refused(args, message):
    if "device" in args and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=message):
        make(str(checkpoint("v32")), **args)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([5] * 1024, "1024.*max_model_len.*1024|max_model_len.*1024"),
        ([600], "token id 600; the vocabulary has ids 0 to 511"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(prompt, message):
    with make(str(checkpoint("v32"))) as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5, 6], prompt], greedy(), use_tqdm=False)
        assert len(llm.generate([[5, 6]], greedy(), use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    with make(str(checkpoint("v32")), page_size=16, max_total_tokens=64) as llm:
        with pytest.raises(ValueError, match="page"):
            llm.generate([[5] * 50], greedy(40), use_tqdm=False)
        assert len(llm.generate([[5] * 50], greedy(14), use_tqdm=False)) == 1


def test_wrong_counts_of_params_and_priorities_are_refused():
    with make(str(checkpoint("v32"))) as llm:
        with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate([[5], [6]], [greedy()], use_tqdm=False)
        with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
            llm.generate([[5], [6]], greedy(), priority=[1], use_tqdm=False)


def test_text_with_tokens_that_the_model_lacks_is_refused():
    with make(str(checkpoint("v32")), skip_tokenizer_init=False, tokenizer="tiny") as llm:  # 4096 tokens, the model has 512
        with pytest.raises(ValueError, match=r"prompt has token id \d+; the vocabulary has ids 0 to 511"):
            llm.generate(["In the beginning"], greedy(), use_tqdm=False)
        assert len(llm.generate([[5, 6]], greedy(2), use_tqdm=False)) == 1


def test_a_call_waits_for_the_end_of_the_last_one():
    with make(str(checkpoint("v32"))) as llm:
        stream = llm.generate_stream([[5], [6]], greedy())
        next(stream)
        with pytest.raises(ValueError, match="another call has not ended"):
            llm.generate([[7]], greedy(), use_tqdm=False)
        assert [chunk.output is not None for chunk in stream].count(True) == 2
        assert len(llm.generate([[7]], greedy(2), use_tqdm=False)) == 1


def test_a_closed_llm_says_so_and_may_be_closed_again():
    llm = make(str(checkpoint("v32")))
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[5]], greedy(), use_tqdm=False), llm.stats):
        with pytest.raises(ValueError, match="this LLM is closed; make another"):
            call()


# ---- several ranks


def refused_then_fine(folder: str, args: dict) -> tuple[str, int]:
    """Rank 0's prompts are bad; every rank must see the same error, and the next call must work."""
    with make(folder, **args) as llm:
        try:
            llm.generate([[5], []], greedy(), use_tqdm=False)
        except ValueError as error:
            message = str(error)
        return message, len(llm.generate([[5], [6], [7]], greedy(), use_tqdm=False))


@pytest.mark.parametrize("args", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_every_rank_gets_the_refusal_and_the_next_call_works(args):
    results = run_ranks(refused_then_fine, 2, str(checkpoint("v32")), args, timeout=90.0)
    assert {message for message, _ in results} == {"prompt is empty; give at least one token id"}
    assert [count for _, count in results] == [3, 0]


def two_calls_at_once(folder: str, args: dict) -> None:
    """Rank 0 leaves a stream open and makes another call; for the other rank the first call goes on."""
    llm = make(folder, dist_timeout=20.0, **args)
    stream = llm.generate_stream([[5], [6]], greedy(64))
    next(stream, None)
    llm.generate([[7]], greedy(), use_tqdm=False)


@pytest.mark.parametrize("args", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_two_calls_at_once_end_every_rank(args):
    start = time.monotonic()
    exits = collect_ranks(two_calls_at_once, 2, str(checkpoint("v32")), args, timeout=60.0)
    assert time.monotonic() - start < 45.0
    assert all(e.code != 0 for e in exits), [e.code for e in exits]
    assert all("another call has not ended" in e.stderr + e.error for e in exits)


def break_layer(folder: str, args: dict, bad_rank: int, how: str) -> None:
    """One rank raises, or is killed, in the middle of a step."""
    llm = make(folder, dist_timeout=20.0, **args)
    if int(os.environ["RANK"]) == bad_rank:
        calls = 0

        def fail(module, inputs):
            nonlocal calls
            calls += 1
            if calls == 5:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("planted fault") if how == "value" else RuntimeError("planted fault")

        next(iter(llm.engine.stage.model.model.layers.values())).register_forward_pre_hook(fail)
    llm.generate([[5, 6, 7]] * 4, greedy(40), use_tqdm=False)


LAYOUTS = [({"tensor_parallel_size": 2}, 1), ({"data_parallel_size": 2}, 0), ({"pipeline_parallel_size": 2}, 1)]


CASES = [(*layout, how) for layout in LAYOUTS for how in ("raise", "kill")] + [({"tensor_parallel_size": 2}, 0, "value")]


@pytest.mark.parametrize(("args", "bad", "how"), CASES, ids=str)
def test_a_broken_rank_ends_all_of_them(args, bad, how):
    start = time.monotonic()
    exits = collect_ranks(break_layer, 2, str(checkpoint("v32")), args, bad, how, timeout=90.0)
    assert time.monotonic() - start < 60.0
    assert all(e.code != 0 for e in exits), [e.code for e in exits]
    other = exits[1 - bad]
    if how != "kill":  # a ValueError out of a step is a bug like any other, not a refusal that every rank has
        assert "planted fault" in exits[bad].stderr + exits[bad].error
        assert f"rank {bad}" in other.stderr + other.error and "planted fault" in other.stderr + other.error
    else:
        assert f"rank {bad}" in other.stderr + other.error


def refusals(folder: str, *settings: dict) -> list[str]:
    """The error of making an engine with each of ``settings``; "" where there is none."""
    found = []
    for args in settings:
        try:
            make(folder, **args)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def missing_shard(folder: str) -> str:
    """Only rank 1 lacks its file (as when one node's copy is incomplete)."""
    from rorqual.engine import assembly as module

    if int(os.environ["RANK"]) == 1:

        def broken(*args, **kwargs):
            raise ValueError("model-00002-of-00002.safetensors is missing")

        module.load_weights = broken
    return refusals(folder, {"tensor_parallel_size": 2})[0]


def test_a_load_error_of_one_rank_reaches_all():
    results = run_ranks(missing_shard, 2, str(checkpoint("v32")), timeout=60.0)
    assert results[1].startswith("model-00002-of-00002.safetensors is missing")
    assert results[0].startswith("rank 1: model-00002-of-00002.safetensors is missing")


def test_world_size_mismatch_names_degrees_and_choices():
    for (message,) in run_ranks(refusals, 2, str(checkpoint("v32")), {"tensor_parallel_size": 4}, timeout=60.0):
        assert "makes 4 ranks, but the job has 2" in message and "dp=1 tp=2" in message and "dp=2 tp=1" in message


def test_layout_that_does_not_divide_names_the_number_and_the_valid_ones():
    layouts = ({"tensor_parallel_size": 3}, {"data_parallel_size": 3})
    for heads, experts in run_ranks(refusals, 3, str(checkpoint("v32")), *layouts, timeout=60.0):
        assert "num_attention_heads 4 does not divide over tensor_parallel_size 3; valid sizes: [1, 2, 4]" in heads
        assert "16 routed experts do not divide over 3" in experts and "[1, 2, 4, 8, 16]" in experts
