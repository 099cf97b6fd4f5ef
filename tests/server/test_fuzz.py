"""A short form of the fuzz command."""

import asyncio

from tests.server.fake_engine import FakeEngine
from tests.server.fuzz import check_well, run
from tests.server.serving import serving


def test_malformed_requests_get_4xx_and_break_nothing():
    with serving(FakeEngine(), body_timeout=1.0, header_timeout=1.0) as served:
        statuses = asyncio.run(asyncio.wait_for(run("127.0.0.1", served.port, 500, seed=7), 100))
        check_well(served.url)
        served.engine.wait(lambda: served.engine.open == 0 and served.process.state.open == 0, "all is quiet")
        assert statuses[200] > 20 and statuses[400] > 100 and served.engine.error is None
