"""One part of the run: a command with a limit, its place in the log, and the rows it leaves."""

from __future__ import annotations

import json
import os
import secrets
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
from .reason import reason_of
from .strays import MARK, end_strays

#: what every part runs with: NVLink multicast stays off; all ranks are on this host, so gloo needs no other interface than loopback
QUIET = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
}  # fmt: skip
_GRACE_S = 5.0  # from SIGTERM to SIGKILL
#: most seconds from a part's limit until all its processes are gone
ENDING_S = 4 * _GRACE_S + 1.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command. Rank 0 of it writes rows (``Row.to_dict``) to the file that replaces ``{out}`` in its words."""

    name: str  # in the log and in the rows
    module: str  # run with ``python -m``
    words: tuple[str, ...]  # its arguments; ``{left}`` becomes the seconds it may take
    ranks: int  # processes under torchrun; 1: one, without it
    limit_s: float  # seconds until it is ended
    left_out: str = ""  # why it is not run at all; '' for a part that is

    @property
    def has_rows(self) -> bool:
        """Whether it must leave rows."""
        return "{out}" in self.words


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a part."""

    part: Part
    code: int | None  # exit code; None: ended at its limit, never begun, or left out
    seconds: float
    rows: tuple[Row, ...] = ()
    reason: str = ""  # the first error that its ranks printed
    strays: int = 0  # processes that were there after its end, and were killed

    @property
    def good(self) -> bool:
        """Nothing went wrong: it is done with rows, or was left out on purpose."""
        return bool(self.part.left_out) or (self.code == 0 and (bool(self.rows) or not self.part.has_rows))

    @property
    def note(self) -> str:
        """How it ended, and why where it did not end well."""
        if self.part.left_out:
            return f"left out: {self.part.left_out}"
        if self.code == 0:
            said = "done" if self.good else "failed: it left no rows"
        elif self.code is None:
            said = "ended at its limit" if self.seconds else "not begun: no time was left"
        else:
            said = f"failed with exit code {self.code}"
        left = f", {self.strays} processes were left and killed" if self.strays and self.code is not None else ""
        return f"{said}{left}" + (f": {self.reason}" if self.reason and not self.good else "")


def run_part(part: Part, out: Path, log: IO[bytes], *, env: dict[str, str], limit_s: float) -> Outcome:
    """Run ``part`` for at most ``limit_s`` seconds; what it prints goes to ``log``, rows it wrote are kept whatever its end.

    No process of it is left when this returns or raises.
    """
    if part.left_out or limit_s <= 0.0:
        return Outcome(part=part, code=None, seconds=0.0)
    words, mark = command(part, out, limit_s), secrets.token_hex(8)
    log.write(f"\n===== {part.name}: {' '.join(words[1:])}, {part.ranks} rank(s), at most {limit_s:.0f} s\n".encode())
    log.flush()
    begin, start = log.tell(), time.monotonic()
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **QUIET, **env, MARK: mark},
        start_new_session=True,
    )  # fmt: skip
    code: int | None
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process, drain_s=_GRACE_S, death_s=_GRACE_S)
        strays = end_strays(mark)
    seconds, reason = time.monotonic() - start, reason_of(_printed(log, begin))
    log.write(f"\n===== {part.name}: {'limit' if code is None else f'exit code {code}'} after {seconds:.1f} s\n".encode())
    log.flush()
    return Outcome(part=part, code=code, seconds=seconds, rows=tuple(read_rows(out)), reason=reason, strays=strays)


def _printed(log: IO[bytes], begin: int) -> bytes:
    """What is in the log from ``begin`` on."""
    with open(log.name, "rb") as file:
        file.seek(begin)
        return file.read()


def command(part: Part, out: Path, left_s: float = 0.0) -> list[str]:
    """The words that run ``part``."""
    words = [word.replace("{out}", str(out)).replace("{left}", f"{left_s:.0f}") for word in part.words]
    if part.ranks == 1:
        return [sys.executable, "-m", part.module, *words]
    # Named by number: a host whose own name leads nowhere can run it too.
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(part.ranks), *meet, "-m", part.module, *words]


def read_rows(path: Path) -> list[Row]:
    """Rows that a part wrote: a list, or a result file. [] when there is no such file; what is no row is left out."""
    found = []
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        listed = list(values["rows"] if isinstance(values, dict) else values)
    except (OSError, ValueError, TypeError, KeyError):
        return []
    for row in listed:
        try:
            found.append(Row(**{k: v for k, v in row.items() if k != "met"}))
        except (ValueError, TypeError, AttributeError):
            continue
    return found


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
    replace_file(Path(path), json.dumps([row.to_dict() for row in rows]))


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, which has the old or the new content at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
