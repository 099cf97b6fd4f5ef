"""How much memory a process holds, for tests of what grows."""

from __future__ import annotations

from pathlib import Path


def own_bytes(pid: int | str = "self") -> int:
    """Resident bytes of a process but for mapped files.

    Pages of libraries are not its own: the kernel drops them when memory is short and maps them again when they are run.
    """
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines())
    return sum(int(status[kind].removesuffix("kB")) << 10 for kind in ("RssAnon", "RssShmem"))
