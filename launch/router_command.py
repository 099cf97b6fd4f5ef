"""``rorqual router``: one address for several servers."""

from __future__ import annotations

import argparse
import logging

from ..engine.server.router.config import RouterConfig
from .flags import Parser, add_options, chosen


def add_parser(parser: Parser) -> None:
    """Flags of ``RouterConfig``."""
    add_options(parser, RouterConfig)


def run(args: argparse.Namespace) -> int:
    """Route requests until a signal ends it."""
    from ..engine.server.router.run import run as route

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s")
    settings = chosen(args, RouterConfig)
    settings["worker_urls"] = tuple(settings.get("worker_urls", ()))
    return route(RouterConfig(**settings))
