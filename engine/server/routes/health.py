"""Is it alive: /health, /ping, /health_generate."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from ...sampling_params import SamplingParams
from ...serving.wire import Submit
from ..errors import ApiError
from ..openai.generation import Generation, failure, pack_ids
from ..openai.prepare import dumps
from ..state import ServerState


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are taken, 503 before (loading) and after (draining, gone)."""
    state: ServerState = request.app.state.server
    state.ready()
    return Response(dumps({"status": "ok"}), media_type="application/json")


async def health_generate(request: Request) -> Response:
    """GET /health_generate: one token through the engine. Probes that come while one runs share its outcome."""
    state: ServerState = request.app.state.server
    state.ready()
    if state.probe is None or state.probe.done():
        state.probe = asyncio.create_task(_probe(state))
    seconds = await asyncio.shield(state.probe)
    return Response(dumps({"status": "ok", "seconds": seconds}), media_type="application/json")


async def _probe(state: ServerState) -> float:
    """Seconds that a token takes.

    Raises:
        ApiError: 503, the engine refused it, failed, or was silent for too long.
    """
    welcome, _ = state.ready()
    start, timeout = time.monotonic(), state.config.health_timeout
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    token = pack_ids([welcome.vocab_size // 2], welcome.vocab_size)
    submit = Submit(
        request_id=f"health-{state.client.name}-{start}", prompt=token, params=params.to_wire(), priority=-(2**31), at=time.time()
    )
    with Generation(state, submit.request_id, [submit], 1) as generation:
        while not generation.taken:
            left = timeout - (time.monotonic() - start)
            items = await generation.take(max(left, 0.001))
            if not items and left <= 0:
                raise ApiError(503, f"the engine has not made a token within {timeout:g} s (--health-timeout)")
            for _, piece in items:
                error = failure(piece)
                if error is not None:
                    raise ApiError(503, error.message)
    return time.monotonic() - start
