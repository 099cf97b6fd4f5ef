"""What ``tests.offload.seeds`` does a hundred times, once and shortly; and that it fails where it has to."""

from __future__ import annotations

import pytest

from tests.offload import scenario, seeds
from tests.offload.engines import PROMPTS, alone, make, params
from tests.offload.scenario import VARIANTS
from tests.offload.seeds import Job, run_job, spread, summary, variant_of

JOB = Job(seeds=(0, 1), modes=("eager",), steps=40, device="cpu", policy="both", prompts=7)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")


def test_two_seeds_keep_tokens():
    rows = list(run_job(JOB))
    assert [row["status"] for row in rows] == ["passed", "passed"], rows
    assert [row["kv_offload"] for row in rows] == ["host", "hybrid"]
    assert all(row["steps"] >= 40 and row["misses"] and row["drops"] and not row["unwritten"] for row in rows)
    found = summary(rows)["eager"]
    assert found["passed"] == 2 and found["failed"] == found["late"] == found["idle"] == 0
    assert found["requests"] == sum(row["requests"] for row in rows) > 5


def test_wrong_tokens_idle_seeds_and_the_end_of_time_are_told(monkeypatch):
    right = scenario.right_tokens

    def wrong(llm, prompts):
        found = right(llm, prompts)
        for prompt in found:
            prompt.expected[0] += 1
        return found

    monkeypatch.setattr(scenario, "OUTPUT", 8)
    monkeypatch.setattr(scenario, "MARGIN", 0.0)
    monkeypatch.setattr(scenario, "right_tokens", wrong)
    job = Job(seeds=(0,), modes=("eager",), steps=12, device="cpu", policy="hybrid", prompts=3)
    (row,) = run_job(job)
    assert row["status"] == "failed" and "instead of" in row["error"]
    monkeypatch.setattr(scenario, "right_tokens", right)
    monkeypatch.setattr(scenario, "draw_prompts", lambda rng, text, count: [[5, 6, 7], [8, 9]])
    (row,) = run_job(job)
    assert row["status"] == "idle" and not row["misses"]
    assert [row["status"] for row in run_job(Job(**vars(JOB) | {"until": 0.0}))] == ["late", "late"]


@pytest.mark.parametrize("workers", [1, 3, 34])
def test_every_seed_has_one_process(workers, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    job = Job(seeds=tuple(range(100)), modes=("eager", "graphs"), steps=1000, device="cuda", policy="both")
    parts = spread(job, workers)
    assert sorted(seed for part in parts for seed in part.seeds) == list(range(100))
    assert max(len(part.seeds) for part in parts) == -(-100 // workers)
    assert len({part.gpu for part in parts}) == min(2, workers)


def test_policies_choose_among_the_settings():
    assert {variant_of(seed, "both") for seed in range(len(VARIANTS))} == set(range(len(VARIANTS)))
    for policy in ("host", "hybrid"):
        assert {VARIANTS[variant_of(seed, policy)]["kv_offload"] for seed in range(9)} == {policy}


def test_a_process_that_ends_early_is_a_failure(monkeypatch):
    class Pipe:
        def recv_bytes(self):
            raise EOFError

    monkeypatch.setattr(seeds.multiprocessing.connection, "wait", lambda pipes, timeout: list(pipes))
    pipe = Pipe()
    (row,) = seeds._gather([pipe], {pipe: {(4, "eager")}}, 0.0, float("inf"))
    assert row == {"seed": 4, "mode": "eager", "status": "failed", "error": "its process ended"}
    (row,) = seeds._gather([pipe], {pipe: {(4, "eager")}}, 0.0, 0.0)
    assert row == {"seed": 4, "mode": "eager", "status": "late"}


def test_an_engine_can_be_shuffled_again():
    """Seeds use engines one after the other."""
    with make("host", seed=1) as llm:
        for seed in (1, 2, 3):
            found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], params(), use_tqdm=False)]
            assert found == [alone(place) for place in range(3)]
            scenario.begin_again(llm, seed)
