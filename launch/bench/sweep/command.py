"""``bench sweep``: start servers of several layouts, put several loads on each, and show what they trade."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...console import table
from ...flags import Parser, add_options, chosen
from ..results import check_folder
from ..serve import command as serve_command
from ..serve.config import TargetConfig
from ..serve.files import read_runs
from ..serve.pareto import frontier, per_device, points
from ..serve.run import measure, say
from ..serve.save import record
from .cells import LoadCase, ServerCase, done, load_cases, server_cases
from .config import SweepConfig
from .server import command_of, free_port, serving


def add_parser(parser: Parser) -> None:
    """Flags of the command: its own, and all of ``bench serve``."""
    add_options(parser, SweepConfig)
    serve_command.add_parser(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sweep; the exit code: 1 when a run had no request that succeeded."""
    serve_command.need_packages()
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    config = SweepConfig(**chosen(argparse.Namespace(**given), SweepConfig))
    target, load, dataset = serve_command.configs(args)
    servers, loads = server_cases(config), load_cases(config, load, dataset)
    if config.dry_run:
        _show(config, servers, loads)
        return 0
    check_folder(config.output_dir)
    path = Path(config.output_dir) / "sweep.jsonl"
    have = done(path)
    if have and not config.resume:
        raise ValueError(f"{path} holds {len(have)} runs; add to them with --resume, or name another folder with --output-dir")
    model = args.model_name or args.model
    failed = 0
    for server in servers:
        todo = [case for case in loads if (server.name, case.key) not in have]
        if todo:
            failed += _measure_server(config, target, server, todo, model, path)
    _report(path, config)
    return 1 if failed else 0


def _show(config: SweepConfig, servers: Sequence[ServerCase], loads: Sequence[LoadCase]) -> None:
    for server in servers:
        words = shlex.join(command_of(config.serve_cmd, 0, server.flags)) if config.serve_cmd else "the server that runs"
        print(f"{server.name}: {words}")
        for case in loads:
            print(f"  {case.key}, {case.dataset.num_prompts or 'all'} requests")


def _measure_server(
    config: SweepConfig, target: TargetConfig, server: ServerCase, todo: Sequence[LoadCase], model: str | None, path: Path
) -> int:
    """Run the loads on one server; how many of them had no request that succeeded."""
    if config.serve_cmd is None:
        return sum(_run(target, server, case, model, path) for case in todo)
    port = free_port()
    command = command_of(config.serve_cmd, port, server.flags)
    log = path.parent / f"server-{server.name.replace(' ', '-').replace('/', '_')}.log"
    say(f"{server.name}: {shlex.join(command)}")
    with serving(command, port, log, config.server_timeout_s):
        there = replace(target, base_url=f"http://127.0.0.1:{port}")
        return sum(_run(there, server, case, model, path) for case in todo)


def _run(target: TargetConfig, server: ServerCase, case: LoadCase, model: str | None, path: Path) -> bool:
    """Measure one load and add it to the file; True when nothing succeeded."""
    measured = serve_command.run_loop(measure(model, target, case.load, case.dataset))
    result: dict[str, Any] = record(measured, target, case.load)
    result |= {"sweep_server": server.name, "sweep_load": case.key, "layout": server.layout or result["layout"] or server.name}
    if server.devices is not None:
        result["devices"] = server.devices
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False) + "\n")
    f = measured.figures
    tpot = f["median_tpot_ms"]
    words = "no request succeeded" if not f["completed"] else f"{f['output_throughput']:.1f} output tokens/s, TPOT {tpot or 0:.2f} ms"
    say(f"{server.name}, {case.key}: {words}" + (f", {f['failed']} failed" if f["failed"] else ""))
    return not f["completed"]


def _report(path: Path, config: SweepConfig) -> None:
    runs = read_runs([path])
    found = points(runs)
    best = {id(p) for p in frontier(found)}
    per = "output tokens/s" + (" a device" if per_device(runs) else "")
    header = ("layout", "load", "tokens/s a user", per, "TTFT ms", "frontier")
    print(
        table(
            header, [(p.layout, p.load, *(round(x, 1) for x in (p.speed, p.throughput, p.ttft_ms)), "*" * (id(p) in best)) for p in found]
        )
    )
    print(f"wrote {path}")
    try:
        from ..serve.page import render

        page = Path(config.output_dir) / "sweep.html"
        page.write_text(render(runs, title="Sweep"), encoding="utf-8")
        print(f"wrote {page}")
    except ValueError as error:
        print(f"no page: {error}")
