"""``bench serve``: load for a server with an OpenAI API. Flags and JSON keys are vLLM's."""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ...flags import Parser, add_options, chosen
from ..datasets.config import DatasetConfig
from ..results import check_folder, write_results
from .config import ServeBenchConfig, TargetConfig
from .http import NEED

T = TypeVar("T")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="The same as --model.")
    parser.add_argument(
        "--model", metavar="MODEL", help="Name of the model at the server, or its folder here (for the tokenizer), or 'tiny'."
    )
    for config in (TargetConfig, ServeBenchConfig, DatasetConfig):
        add_options(parser, config)


def configs(args: argparse.Namespace) -> tuple[TargetConfig, ServeBenchConfig, DatasetConfig]:
    """The settings that were given; ValueError when one is wrong."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    namespace = argparse.Namespace(**given)
    return (
        TargetConfig(**chosen(namespace, TargetConfig)),
        ServeBenchConfig(**chosen(namespace, ServeBenchConfig)),
        DatasetConfig(**chosen(namespace, DatasetConfig)),
    )


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on uvloop where it is installed, with as many open files as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def need_packages() -> None:
    """ValueError when a package that the load client needs is missing."""
    try:
        import httptools  # noqa: F401
        import msgspec  # noqa: F401
    except ImportError:
        raise ValueError(NEED) from None


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code: 1 when no request succeeded."""
    need_packages()
    from .run import measure
    from .save import record, rows, save
    from .text import shown

    target, load, dataset = configs(args)
    if load.save_result or load.append_result:
        check_folder(load.result_dir)
    check_folder(load.results_dir)
    measured = run_loop(measure(args.model_name or args.model, target, load, dataset))
    print(shown(measured, load))
    result = record(measured, target, load)
    if load.save_result or load.append_result or load.save_detailed or load.result_filename is not None:
        print(f"wrote {save(result, load)}")
    if load.results_dir is not None:
        print(f"wrote {write_results(rows(result), Path(load.results_dir))}")
    return 0 if measured.figures["completed"] else 1
