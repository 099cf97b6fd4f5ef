"""One part of the run: a command with a limit, its place in the log, and the rows it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...errors import rank
from ..process_group import end
from ..results import Row

#: what every part runs with: NVLink multicast stays off
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "OMP_NUM_THREADS": "1"}
_GRACE_S = 5.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command. Rank 0 of it writes rows (``Row.to_dict``) to the file that replaces ``{out}`` in its words."""

    name: str  # in the log and in the rows
    module: str  # run with ``python -m``
    words: tuple[str, ...]  # its arguments
    ranks: int  # processes under torchrun; 1: one, without it
    limit_s: float  # seconds until it is ended


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a part."""

    part: Part
    code: int | None  # exit code; None: ended at its limit, or there was no time for it
    seconds: float
    rows: tuple[Row, ...]

    @property
    def note(self) -> str:
        """In a word."""
        if self.code == 0:
            return "done"
        if self.code is None:
            return "ended at its limit" if self.seconds else "not begun: no time was left"
        return f"failed with exit code {self.code}"


def run_part(part: Part, out: Path, log: IO[bytes], *, env: dict[str, str], limit_s: float) -> Outcome:
    """Run ``part`` for at most ``limit_s`` seconds; what it prints goes to ``log``, rows it wrote are kept whatever its end."""
    if limit_s <= 0.0:
        return Outcome(part=part, code=None, seconds=0.0, rows=())
    log.write(f"\n===== {part.name}: {' '.join((part.module, *part.words))}, {part.ranks} rank(s)\n".encode())
    log.flush()
    start = time.monotonic()
    words = command(part, out)
    process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **QUIET, **env}, start_new_session=True)
    code: int | None
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process, drain_s=_GRACE_S, death_s=_GRACE_S)
    return Outcome(part=part, code=code, seconds=time.monotonic() - start, rows=tuple(read_rows(out)))


def command(part: Part, out: Path) -> list[str]:
    """The words that run ``part``."""
    words = [word.replace("{out}", str(out)) for word in part.words]
    if part.ranks == 1:
        return [sys.executable, "-m", part.module, *words]
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(part.ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [sys.executable, *start, "-m", part.module, *words]


def read_rows(path: Path) -> list[Row]:
    """Rows that a part wrote: a list, or a result file. [] when there is no such file or it is cut off."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    listed = values["rows"] if isinstance(values, dict) else values
    return [Row(**{k: v for k, v in row.items() if k != "met"}) for row in listed]


def keep_rows(rows: Iterable[Row], path: str, prefix: str = "") -> None:
    """Write and print each row as it comes. Every rank goes through them, since measuring is collective; rank 0 writes."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        if rank() == 0:
            write_rows(path, found)
            print(f"{prefix}{row.name}: {row.value:.1f} {row.unit}", flush=True)


def write_rows(path: str, rows: Sequence[Row]) -> None:
    """What a part calls, also between two of its figures, so that a limit does not take the first of them."""
    whole = Path(path).with_suffix(".part")
    whole.write_text(json.dumps([row.to_dict() for row in rows]), encoding="utf-8")
    os.replace(whole, path)
