"""Flags of ``bench sweep``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ....engine.option import check_least, option

#: degree of a layout's word -> the flag of ``rorqual serve``
DEGREES = {"pp": "--pipeline-parallel-size", "dp": "--data-parallel-size", "tp": "--tensor-parallel-size"}


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Which servers, and which loads on each."""

    serve_cmd: str | None = option(
        None, "Command that starts a server; {port} is replaced by a free port. Without it the server of --port is measured.", group="sweep"
    )
    layouts: tuple[str, ...] = option((), "Layouts to start the server with, such as tp8 dp8 dp4tp2; their flags are added.", group="sweep")
    serve_params: str | None = option(None, "JSON file: a list of objects, each the further flags of one server.", group="sweep")
    concurrency: tuple[int, ...] = option((), "Values of --max-concurrency.", group="sweep")
    request_rates: tuple[float, ...] = option((), "Values of --request-rate.", group="sweep")
    num_runs: int = option(1, "Times to measure each.", group="sweep")
    prompts_per_client: int = option(
        8, "Requests of a run for each that runs at a time, unless --num-prompts says how many.", group="sweep"
    )
    output_dir: str = option("sweep", "Folder of sweep.jsonl, sweep.html and the servers' logs.", "-o", group="sweep")
    resume: bool = option(False, "Leave out what sweep.jsonl has already.", group="sweep")
    dry_run: bool = option(False, "Print what would run.", group="sweep")
    server_timeout_s: float = option(1200.0, "How long a server may take to come up.", group="sweep")

    def __post_init__(self) -> None:
        check_least(self, 1, "num_runs", "prompts_per_client")
        if any(n < 1 for n in self.concurrency) or not all(rate > 0 for rate in self.request_rates):
            raise ValueError("--concurrency and --request-rates must be above 0")
        if self.serve_cmd is None and (self.layouts or self.serve_params):
            raise ValueError("--layouts and --serve-params need --serve-cmd, the command that starts a server")
        for layout in self.layouts:
            layout_flags(layout)


def layout_flags(layout: str) -> list[str]:
    """``dp4tp2`` -> ["--data-parallel-size", "4", "--tensor-parallel-size", "2"]; ValueError for another word."""
    parts = re.findall(r"(pp|dp|tp)(\d+)", layout)
    if not parts or "".join(a + b for a, b in parts) != re.sub(r"[\s,_x-]", "", layout) or len({a for a, _ in parts}) < len(parts):
        raise ValueError(f"a layout is written such as tp8, dp4tp2 or pp2dp2tp2, found {layout!r}")
    return [word for degree, size in parts for word in (DEGREES[degree], size)]


def devices_of(layout: str) -> int:
    """How many devices a layout takes."""
    count = 1
    for _, size in re.findall(r"(pp|dp|tp)(\d+)", layout):
        count *= int(size)
    return count
