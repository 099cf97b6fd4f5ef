"""CPU time of processes, and where it goes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

#: samples a second of a profile
RATE = 200


def cpu_seconds(pids: Sequence[int]) -> float:
    """Seconds that processes have spent, user and system together (Linux)."""
    total = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


class Profile:
    """Samples of a process by py-spy while a block runs; ``table`` says what was on top of the stack, and under what."""

    def __init__(self, pid: int, seconds: float, path: Path) -> None:
        """Sample ``pid`` for ``seconds`` into ``path`` (a stack a line, as flame graphs take it).

        Raises:
            ValueError: py-spy is not installed.
        """
        program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        if program is None:
            raise ValueError("--profile-dir needs py-spy; pip install py-spy")
        words = [
            program,
            "record",
            "-p",
            str(pid),
            "-d",
            str(max(1, round(seconds))),
            "-r",
            str(RATE),
            "--gil",
            "-f",
            "raw",
            "-o",
            str(path),
        ]
        self.path = path
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def finish(self, patience_s: float) -> None:
        """Wait for it; ValueError with what it says when it fails."""
        try:
            _, said = self._process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise ValueError(f"py-spy did not end within {patience_s:g} s") from None
        if self._process.returncode != 0:
            raise ValueError(f"py-spy could not sample the server: {said.decode('utf-8', 'replace').strip()[-300:]}")


def hot(path: Path, most: int = 15) -> list[tuple[str, float, float]]:
    """(function, its own share of the samples, its share with what it calls) of the functions with most of their own."""
    own: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        if not count.isdigit():
            continue
        names = [re.sub(r":\d+\)", ")", frame) for frame in stack.split(";")]  # without line numbers
        own[names[-1]] += int(count)
        for name in set(names):
            inside[name] += int(count)
    total = sum(own.values()) or 1
    return [(name, n / total, inside[name] / total) for name, n in own.most_common(most)]
