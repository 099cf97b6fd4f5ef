"""The embedded model through the engine: held-out loss, recall, greedy tokens, key selection and expert load as its reference says.

Recall tells a working indexer from a broken one (a window or random keys lose every fact); the loss tells the rest.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams

TINY = Path(__file__).resolve().parents[2] / "launch" / "tiny"
REFERENCE = json.loads((TINY / "eval" / "reference.json").read_text())
RECALL = [json.loads(line) for line in (TINY / "eval" / "recall.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float32", disable_log_stats=True, max_num_batched_tokens=2048, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture
def plant(llm):
    """Set the key selection of every layer; back to the indexer afterwards."""

    yield llm.engine.stage.model.plant_selection
    llm.engine.stage.model.plant_selection("indexer")


def heldout_loss(llm: LLM, windows: int) -> float:
    """Mean negative log-likelihood of the first held-out windows (4,095 tokens, the begin token before each)."""
    ids = llm.engine.tokenizer.encode((TINY / "eval" / "heldout.txt").read_text(), add_special_tokens=False)
    prompts = [[0, *ids[i * 4095 : (i + 1) * 4095]] for i in range(windows)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total = count = 0
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            total -= row[token].logprob
            count += 1
    return total / count


def recall(llm: LLM, length: int, n: int) -> int:
    """How many of the first ``n`` prompts of ``length`` tokens get the exact answer."""
    rows = [r for r in RECALL if r["target_tokens"] == length][:n]
    wanted = [llm.engine.tokenizer.encode(" " + r["answer"], add_special_tokens=False) for r in rows]
    params = [SamplingParams(temperature=0.0, max_tokens=len(w), ignore_eos=True) for w in wanted]
    outputs = llm.generate([r["prompt"] for r in rows], params, use_tqdm=False)
    return sum(o.outputs[0].token_ids == w for o, w in zip(outputs, wanted, strict=True))


def test_heldout_loss_is_the_reference(llm, plant):
    """Sparse and dense attention over the whole file; dense is lower by 0.0056."""
    sparse = heldout_loss(llm, 4)
    plant("dense")
    dense = heldout_loss(llm, 4)
    assert sparse == pytest.approx(REFERENCE["heldout"]["sparse"]["loss"], abs=5e-4)
    assert dense == pytest.approx(REFERENCE["heldout"]["dense"]["loss"], abs=5e-4)


def test_random_keys_cost_the_loss_and_a_window_does_not(llm, plant):
    sparse = heldout_loss(llm, 1)
    plant("random")
    assert heldout_loss(llm, 1) - sparse > 1.0
    plant("recent")
    assert abs(heldout_loss(llm, 1) - sparse) < 0.1


@pytest.mark.parametrize(("length", "n"), [(512, 24), (1024, 12), (2048, 8), (7500, 3)])
def test_recall_is_perfect(llm, length, n):
    assert recall(llm, length, n) == n


@pytest.mark.parametrize(("selection", "right"), [("dense", 12), ("recent", 0), ("random", 0)])
def test_recall_with_planted_selection(llm, plant, selection, right):
    plant(selection)
    assert recall(llm, 512, 12) == right


def test_fp8_rows_keep_recall():
    """The cache in its FP8 formats: latent rows with a scale per 128 values, index keys rotated and page-planar."""
    with LLM("tiny", dtype="bfloat16", kv_cache_dtype="fp8", disable_log_stats=True, max_total_tokens=16384) as engine:
        assert recall(engine, 512, 12) >= 11


def test_greedy_tokens_are_the_reference(llm):
    """Every token whose margin is above float noise; after a closer call the texts may part."""
    rows = REFERENCE["prompts"]
    texts = [json.loads(line)["prompt"] for line in (TINY / "eval" / "prompts.jsonl").read_text().splitlines()]
    outputs = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=48, logprobs=2), use_tqdm=False)
    compared = 0
    for row, output in zip(rows, outputs, strict=True):
        assert output.prompt_token_ids == row["prompt_ids"]
        close = next((i for i, margin in enumerate(row["margins"]) if margin < 0.002), len(row["ids"]))
        assert output.outputs[0].token_ids[:close] == row["ids"][:close], row["id"]
        compared += close
        first = output.outputs[0].logprobs[0]
        gap = row["first_top5"][0][1] - row["first_top5"][1][1]
        ours = [first[row["first_top5"][i][0]].logprob for i in range(2)]
        assert math.isclose(ours[0] - ours[1], gap, abs_tol=5e-4)
    assert compared > 800


def test_expert_load_is_the_reference(llm):
    ids = llm.engine.tokenizer.encode((TINY / "eval" / "heldout.txt").read_text(), add_special_tokens=False)
    prompts = [[0, *ids[i : i + 4095]] for i in range(0, len(ids), 4095)]
    llm.engine.stage.load.reset()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    loads = torch.tensor(llm.stats()["expert_load"])
    layers = [i for i in REFERENCE["expert_load"]["layers"] if i < 5]
    expected = torch.tensor(REFERENCE["expert_load"]["counts"][: len(layers)])
    assert loads[0].sum() == 0
    assert (loads[layers] - expected).abs().max() <= 3  # choices within float noise of each other may fall either way
    assert torch.equal(loads[layers].sum(1), expected.sum(1))


def test_selected_keys_are_the_reference(llm):
    """The keys each layer's indexer keeps for the last position of two recall prompts."""
    for case in REFERENCE["selected"]:
        prompt = RECALL[case["recall_line"]]["prompt"]
        found: list[list[int]] = []
        hooks = []
        for layer in llm.engine.stage.model.model.layers.values():
            hooks.append(layer.self_attn.register_forward_hook(lambda m, a, out, found=found: found.append(out[1][-1].tolist())))
        try:
            ids = llm.engine.tokenizer.encode(prompt)
            llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        finally:
            for hook in hooks:
                hook.remove()
        for mine, theirs in zip(found[-5:], case["layers"], strict=True):  # the last chunk's layers
            assert len(set(mine) ^ set(theirs)) <= 2, (mine, theirs)
