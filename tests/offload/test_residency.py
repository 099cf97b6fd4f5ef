"""Random scripts with a device that holds little more than one request: every request's tokens are those of its lone run."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.offload.tiered import TieredLoop, tiered
from tests.scheduler.test_random import expect, play, scripts


@st.composite
def tiered_scripts(draw):
    script = draw(scripts())
    config = tiered(
        script.config, policy=draw(st.sampled_from(["host", "hybrid"])), topk=draw(st.integers(1, 9)), hot=draw(st.integers(1, 3)),
        spare=draw(st.sampled_from([0, 0, 1, 2, 5, 40])), host=draw(st.integers(0, 3)),
    )  # fmt: skip
    return replace(script, config=config)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tiered_scripts())
def test_every_request_ends_with_the_tokens_of_its_lone_run(script):
    loop = play(script, TieredLoop)
    for arrival in script.arrivals:
        expect(arrival, script.config)
    loop.drain()
