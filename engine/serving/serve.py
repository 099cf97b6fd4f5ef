"""Serving with all ranks of an engine: the loop that does not end by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from ..driver import protected
from ..engine import Engine
from ..follower import follow
from ..leader import Leader
from ..request import Request
from .controls import Controls
from .drain import Signals
from .front import ServeFront
from .gauge import Gauge
from .limits import QueueLimit
from .link import Link
from .meter import Meter
from .peers import Keeper
from .routing.router import Router
from .server import Server
from .settings import ServeSettings
from .snapshot import Reporter
from .wire import PROTOCOL, Welcome

_LONGEST_SLEEP_S = 1.0
_LOG_EVERY_S = 10.0


def serve(
    engine: Engine,
    link: Link | None,
    settings: ServeSettings | None = None,
    *,
    every_second: Callable[[], None] | None = None,
    replace: Callable[[str, str], None] | None = None,
    for_good: bool = False,
) -> int:
    """Serve what comes over ``link`` until a signal ends it. Collective: every rank calls it.

    Args:
        engine: made on all ranks; no call may be open.
        link: rank 0's socket; None elsewhere. It stays open.
        settings: rank 0's count.
        every_second: called about so often by rank 0, such as to look after HTTP processes; what it raises ends all ranks.
        replace: called by rank 0 with the name of an HTTP process that is hung, and why it is thought so.
        for_good: this process ends afterwards: signals that ask it to are ignored from then on.

    Returns:
        0, on every rank: all requests have ended.
    """
    settings = settings or ServeSettings()
    gc.collect()
    gc.freeze()  # what is there stays: it need not be looked through whenever garbage is collected between steps
    try:
        with protected(engine.grid):
            _run(engine, link, settings, Keeper(every_second=every_second or _nothing, replace=replace or _nothing), for_good)
    finally:
        gc.unfreeze()
        if engine.leader is not None:
            engine.leader.reporters.clear()
    return 0


def _nothing(*_: str) -> None:
    """Nobody looks after HTTP processes."""


def _run(engine: Engine, link: Link | None, settings: ServeSettings, keeper: Keeper, for_good: bool) -> None:
    """What this rank does."""
    if engine.leader is not None:
        gauge = Gauge(grid=engine.grid, leader=engine.leader, runner=engine.runner, stage=engine.stage, experts=engine.experts)
        engine.leader.reporters["numbers"] = gauge.due
        engine.leader.guides.warm()
        if settings.dp_routing == "kv" and engine.grid.spec.dp > 1:
            engine.leader.reporters["prefixes"] = engine.leader.scheduler.log_prefixes().take
    if link is not None:
        assert engine.leader is not None and engine.grid.rank == 0, "only rank 0 has the link"
        _serve(engine, engine.leader, link, settings, keeper, for_good)
    else:
        with Signals(engine.grid.progress, for_good=for_good):  # rank 0 says when it is over
            _work(engine, Controls(engine, settings.profile_dir))


def _work(engine: Engine, controls: Controls) -> None:
    """A rank that is not rank 0."""
    leader = engine.leader
    if leader is None:
        follow(engine.driver.plans, engine.runner, controls.run)
        return
    leader.answer = controls.run
    done = False
    while not done:
        _, done = leader.tick([], more=False)
    engine.driver.end()


def _serve(engine: Engine, leader: Leader, link: Link, settings: ServeSettings, keeper: Keeper, for_good: bool) -> None:
    dp, config = engine.grid.spec.dp, leader.scheduler.config
    limit = QueueLimit(seats=dp * config.max_num_seqs, most_waiting=settings.max_queued_requests)
    meter = Meter(dp)
    reporter = Reporter(meter, dp, log_every_s=0 if engine.config.disable_log_stats else _LOG_EVERY_S)
    router = Router(dp, settings, page_size=config.page_size)

    def validate(request: Request) -> None:
        leader.scheduler.validate(request)
        leader.guides.admit(request)

    front = ServeFront(router=router, vocab_size=engine.model_config.vocab_size, validate=validate, limit=limit, meter=meter)
    server = Server(
        leader=leader, front=front, link=link, welcome=welcome(engine), meter=meter, reporter=reporter, settings=settings, grid=engine.grid,
        idle_s=min(_LONGEST_SLEEP_S, engine.config.dist_timeout / 4), keeper=keeper, for_good=for_good,
    )  # fmt: skip
    leader.answer = Controls(engine, settings.profile_dir, server.on_answers).run
    try:
        server.run()
        done = False
        while not done:
            _, done = leader.tick([], more=False)
        engine.driver.end()
    finally:
        leader.deliver = leader.heard = leader.answer = None


def welcome(engine: Engine) -> Welcome:
    """What HTTP processes are told of an engine."""
    spec, cache, model = engine.grid.spec, engine.runner.cache, engine.model_config
    return Welcome(
        protocol=PROTOCOL, version=_version(), model=engine.config.model, model_type=model.model_type,
        folder="" if engine.tokenizer is None else str(engine.tokenizer_folder()),
        max_model_len=engine.max_model_len, vocab_size=model.vocab_size, eos_token_ids=list(model.eos_token_ids), dp_size=spec.dp,
        layout=f"pp{spec.pp} dp{spec.dp} tp{spec.tp}", device=_device(engine.grid.device),
        page_size=cache.page_size, pool_tokens=cache.n_pages * cache.page_size,
        started=time.time(),
    )  # fmt: skip


def _device(device: torch.device) -> str:
    """What the ranks compute on, as their makers call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version() -> str:
    from ... import __version__

    return __version__
