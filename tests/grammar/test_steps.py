"""Masks through the whole loop on a model of integers: overlap, graphs, replicas, preemption, and what must fail closed."""

from __future__ import annotations

import pytest

from tests.engine.stub import StubEngine, mixed_params, prompts
from tests.grammar.rigged import keeps, rig, with_rules
from tests.ranks import run_ranks


def run(count: int = 12, every: int = 2, **settings):
    engine = StubEngine(**settings)
    guides = rig(engine)
    params = with_rules(mixed_params(count), every)
    outputs = engine.outputs(prompts(count), params)
    for output, asked in zip(outputs, params, strict=True):
        tokens = output.outputs[0].token_ids
        assert keeps(tokens, asked) and tokens, output
    assert guides.masked and not len(guides)
    return [o.outputs[0].token_ids for o in outputs], engine


@pytest.fixture(scope="module")
def serial():
    return run(overlap=False)[0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"sizes": (1, 2, 4, 8)}, {"sizes": (4,), "overlap": False}, {"sizes": (2, 8), "debug": True}, {"max_num_batched_tokens": 3},
     {"n_pages": 24, "admission_horizon": 0}, {"max_num_seqs": 3}, {"prefix_caching": False}],
)  # fmt: skip
def test_tokens_do_not_depend_on_how_steps_are_run(settings, serial):
    found, engine = run(**settings)
    assert found == serial
    if "n_pages" in settings:
        assert engine.leader.scheduler.stats.preemptions
    if "sizes" in settings:
        assert engine.runner.stats.graph_steps


def rank_run(dp: int):
    engine = StubEngine(dp=dp, sizes=(1, 2, 4, 8))
    guides = rig(engine)
    params = with_rules(mixed_params(12), 3)
    found = [c for c in engine.driver.run(prompts(12), params, None) if c.output is not None]
    engine.leader.scheduler.check()
    assert guides.masked and not len(guides)
    engine.grid.close()
    return [c.output.outputs[0].token_ids for c in sorted(found, key=lambda c: c.prompt_index)]


def test_replicas_keep_the_tokens():
    assert run_ranks(rank_run, 2, 2)[0] == run(every=3, overlap=False)[0]


@pytest.mark.parametrize("settings", [{}, {"sizes": (1, 2, 4)}])
def test_a_wrong_mask_fails_closed(settings):
    """As if a mask were made from stale tokens: the text that breaks the form does not come out, the others go on."""
    engine = StubEngine(**settings)
    guides = rig(engine)
    guides.wrong["0-2.0"] = 5
    params = with_rules(mixed_params(6))
    outputs = engine.outputs(prompts(6), params)
    bad = outputs[2].outputs[0]
    assert bad.finish_reason == "error" and len(bad.token_ids) == 5 and keeps(bad.token_ids, params[2])
    assert all(o.outputs[0].finish_reason == "length" or o.outputs[0].finish_reason == "stop" for i, o in enumerate(outputs) if i != 2)
    engine.leader.scheduler.check()


def test_a_dead_end_ends_its_request_only():
    engine = StubEngine()
    guides = rig(engine)
    guides.dead["0-0.0"], guides.dead["0-4.0"] = 0, 3
    outputs = engine.outputs(prompts(6), with_rules(mixed_params(6)))
    assert [o.outputs[0].finish_reason for o in outputs].count("error") == 2
    assert outputs[0].outputs[0].token_ids == [] and len(outputs[4].outputs[0].token_ids) == 3
    engine.leader.scheduler.check()


def test_aborts_at_every_moment():
    right = run(6)[0]
    for moment in range(0, 40, 5):
        engine = StubEngine(n_pages=40)
        rig(engine)
        params, got = with_rules(mixed_params(6)), {}
        for chunks, chunk in enumerate(engine.driver.run(prompts(6), params, None)):
            if chunks == moment:
                engine.driver.abort("0-0")
                engine.driver.abort("0-3")
            if chunk.output is not None:
                got[chunk.prompt_index] = chunk.output.outputs[0]
        assert sorted(got) == list(range(6))
        for i, one in got.items():
            assert one.token_ids == right[i][: len(one.token_ids)] and (one.finish_reason == "abort" or one.token_ids == right[i])
        engine.leader.scheduler.check()
        assert not len(engine.leader.guides)
