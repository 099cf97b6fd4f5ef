"""``serve``: an OpenAI server over the ranks of an engine. Every rank runs it; rank 0 also starts the HTTP processes."""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..engine.config import EngineConfig
from ..engine.server.config import ServerConfig, check_server_config, with_environment
from ..engine.serving.settings import ServeSettings
from .errors import rank
from .flags import Parser, add_options, add_spellings, chosen
from .model_argument import add_model, model_of
from .nodes.settings import NodeSettings
from .session import open_llm, show_log

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.serving.link import Link
    from .serve_processes import HttpProcesses

log = logging.getLogger("rorqual")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser)
    add_options(parser, ServerConfig)
    add_options(parser, ServeSettings)
    add_options(parser, NodeSettings)
    add_options(parser, EngineConfig)
    add_spellings(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; the exit code."""
    from ..parallel.grid import Grid
    from .torchrun_exec import needs_ranks, start_ranks

    model = model_of(args)
    settings = chosen(args, EngineConfig, skip=("model",))
    nodes = NodeSettings(**chosen(args, NodeSettings))
    world = ranks_of(EngineConfig(model=model, **settings))
    if needs_ranks(nodes, world):
        check(args)
        return start_ranks(nodes, world, sys.argv[1:])
    with Grid.declining():
        server, serving = check(args)
        front = open_front(server) if rank() == 0 else nothing()
        link, processes = front.__enter__()
    try:
        code = _serve(model, settings, serving, link, processes)
    finally:
        front.__exit__(None, None, None)
    return code


def check(args: argparse.Namespace) -> tuple[ServerConfig, ServeSettings]:
    """The settings of the server.

    Raises:
        ValueError: one is out of range, or a package is missing.
    """
    from ..engine.server.needs import need

    for module in ("zmq", "fastapi", "uvicorn", "httptools"):
        need(module)
    server = check_server_config(with_environment(ServerConfig(**chosen(args, ServerConfig))))
    return server, ServeSettings(**chosen(args, ServeSettings))


def ranks_of(config: EngineConfig) -> int:
    """Ranks of the layout that the flags ask for."""
    from ..engine.resolved import grid_spec

    return grid_spec(config).world


def _serve(model: str, settings: dict[str, Any], serving: ServeSettings, link: Link | None, processes: HttpProcesses | None) -> int:
    """Make the engine and serve with it."""
    from ..engine.serving.serve import serve

    with open_llm(model, settings) as llm:
        _warm_up(llm, serving)
        if processes is None:
            return serve(llm.engine, link, serving, for_good=True)
        return serve(llm.engine, link, serving, every_second=processes.look_after, replace=processes.replace, for_good=True)


def _warm_up(llm: LLM, serving: ServeSettings) -> None:
    """Compile kernels, if rank 0 is to: it is collective, and nobody has compared the flags of serving between hosts."""
    engine = llm.engine
    if engine.grid.world.gather_ints([serving.skip_server_warmup])[0, 0]:
        return
    seconds = engine.warm_up()
    if seconds >= 0.1 and rank() == 0 and not engine.config.disable_log_stats:
        log.info("kernels of prompts are compiled (%.1f s)", seconds)


def _leave(number: int, frame: Any) -> None:
    """End by the way that removes sockets and ends the HTTP processes."""
    raise SystemExit(128 + number)


@contextmanager
def nothing() -> Iterator[tuple[None, None]]:
    """In the place of ``open_front`` on the other ranks."""
    yield None, None


@contextmanager
def open_front(config: ServerConfig) -> Iterator[tuple[Link, HttpProcesses]]:
    """Rank 0's socket and HTTP processes, gone when the block is left.

    Raises:
        ValueError: the port is in use, or an address is not of this host.
    """
    from ..engine.serving.link import Link
    from .serve_processes import HttpProcesses
    from .serve_socket import close_listener, is_open_to_others, open_listener

    show_log()
    listener, url = open_listener(config)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)  # while the model is loaded; the serving loop then drains instead
    folder = tempfile.mkdtemp(prefix="rorqual-")  # 0700
    try:
        if is_open_to_others(config) and not config.api_key:
            log.warning("%s can be reached from other machines and asks for no key; set --api-key or RORQUAL_API_KEY", url)
        link = Link(folder)
        processes = HttpProcesses(config, address=link.address, descriptor=listener.fileno(), counts_folder=folder)
        try:
            processes.start()
            log.info("listening at %s; /health answers 200 when the model is loaded", url)
            yield link, processes
        finally:
            link.close()
            processes.stop()
    finally:
        close_listener(listener, config)
        shutil.rmtree(folder, ignore_errors=True)
