"""``bench comm --check``: the conformance checks of every backend, on the ranks and devices that there are."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator

import torch

from .checks import Party, applicable, in_threads
from .checks.grids import over_grid
from .crew import Crew

#: backends whose waits end by themselves, with a report
_WAIT = ("symm", "nvshmem", "shm", "virtual")
Outcome = tuple[str, str, float]  # check, "ok" or "skipped: why" or "FAILED: what" with its numbers, seconds


def run_checks(party: Party, *, brief: bool) -> Iterator[Outcome]:
    """The outcome of each check; the first failure ends it, because the ranks may have parted."""
    for name, check in applicable(party, fault_mask=party.backend in _WAIT, brief=brief).items():
        start = time.perf_counter()
        try:
            found = check(party)
            said = f"skipped: {found['skipped']}" if "skipped" in found else "ok"
            said += "".join(f"  {key} {value}" for key, value in found.items() if key != "skipped")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"FAILED: {type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        yield name, said, time.perf_counter() - start
        if said.startswith("FAILED"):
            return


def check_all(crew: Crew, backends: list[str], *, brief: bool) -> int:
    """Run every check on every backend and print a line each; the exit code is 1 when one failed on any rank."""
    for backend in backends:
        if crew.speaks:
            print(f"{backend}: {crew.size} ranks, {crew.device.type}", flush=True)
        failed = _run(crew, backend, brief=brief)
        if crew.worst([float(failed)])[0] > 0:
            return 1
    return 0


def _run(crew: Crew, backend: str, *, brief: bool) -> bool:
    """Whether a check failed on a rank of this process. Rank 0 tells as it goes, another what failed."""

    def work(party: Party) -> bool:
        failed = False
        for name, said, seconds in run_checks(party, brief=brief):
            failed = said.startswith("FAILED")
            if party.rank == 0 or failed:
                print(f"  {name:14s} {seconds:6.1f} s  {said}{f' (rank {party.rank})' if party.rank else ''}", flush=True)
        return failed

    if crew.grid is not None:
        return work(over_grid(crew.grid, backend))
    if crew.device.type != "cuda":
        return any(in_threads(crew.size, work, limit_s=600.0))

    def on_own_stream(party: Party) -> bool:
        stream = torch.cuda.Stream(party.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # a rank that waits must not stand in the way of one that sends
            return work(party)

    return any(in_threads(crew.size, on_own_stream, device=crew.device, limit_s=600.0))
