"""One server over a fake engine for the tests that only ask it."""

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving


@pytest.fixture(scope="session")
def shared():
    with serving(FakeEngine(), served_model_name=("tiny", "other")) as served:
        yield served


@pytest.fixture
def served(shared):
    """The shared server, with the fake engine's knobs as they were at the start."""
    engine = shared.engine
    knobs = {name: getattr(engine, name) for name in ("delay", "first_delay", "chunk", "script", "refuse", "fail_after", "cached_tokens")}
    with shared.http() as client:  # its question reaches the engine behind all that the last test left on its way
        assert client.get("/server_info").status_code == 200
    engine.submits.clear()
    engine.aborts.clear()
    engine.controls.clear()
    yield shared
    for name, value in knobs.items():
        setattr(engine, name, value)
    engine.wait(lambda: engine.open == 0, "completions left open by a test")
    assert engine.error is None
    assert shared.process.state.open == 0 and shared.process.state.client.open == 0
