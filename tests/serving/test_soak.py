"""The short form of ``python -m tests.serving.soak``."""

from __future__ import annotations

import signal

from tests.serving.ranks import costless, good_ends
from tests.serving.soak import soak


def test_random_requests_aborts_and_leaving_clients():
    with costless(2, dp=2, n_pages=64, timeout=120, settings={"dp_routing": "kv"}) as engine:
        found = soak(engine, 400, clients=4, deadline_s=90)
        engine.signal(signal.SIGTERM)
    good_ends(engine)
    assert found["length"] > 100 and found["abort"] > 0, found
