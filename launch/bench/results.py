"""Result files: measurements that the project stands by, one JSON file per benchmark, device and day."""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...parallel.json_text import parse_json

#: where the project's own results are
RESULTS = Path(__file__).resolve().parent / "results"
#: flags that say where figures and prints go, which is no part of how they came about
_PLACES = ("--output-json", "--results-dir", "--result-dir", "--plot", "--save-recorded", "--log")


def command_line() -> str:
    """The command that is running, without where its figures go."""
    return shlex.join(["rorqual", *without_places(sys.argv[1:])])


def without_places(words: Sequence[str]) -> list[str]:
    """``words`` without flags that say where figures go, and what they say."""
    before = ["", *words][: len(words)]
    return [word for last, word in zip(before, words, strict=True) if last not in _PLACES and word.partition("=")[0] not in _PLACES]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure."""

    name: str  # what was measured
    params: dict[str, Any]  # under which settings
    value: float  # the figure
    unit: str  # its unit
    better: Literal["lower", "higher"]  # which way is good
    roof: float | None = None  # share of what the hardware can do, 0 to 1; None when there is no such bound
    peers: dict[str, float] = field(default_factory=dict)  # the same figure of others, in the same run
    target: float | None = None  # what the figure had to reach; None when nothing was promised

    def __post_init__(self) -> None:
        numbers = {"value": self.value, "roof": self.roof, "target": self.target, **{f"peers[{k!r}]": v for k, v in self.peers.items()}}
        for name, number in numbers.items():
            if number is not None and not math.isfinite(number):
                raise ValueError(f"result {self.name!r}: {name} must be a finite number, found {number}")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"result {self.name!r}: better must be 'lower' or 'higher', found {self.better!r}")

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def to_dict(self) -> dict[str, Any]:
        """The row as the file holds it."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, kw_only=True)
class Results:
    """One result file."""

    bench: str  # name of the benchmark
    command: str  # the command line that made it
    date: str  # yyyy-mm-dd
    device: str  # what it ran on
    versions: dict[str, str | None]  # versions of what took part
    rows: tuple[Row, ...]  # the figures, met or not

    def to_dict(self) -> dict[str, Any]:
        """The file's content."""
        head = {"bench": self.bench, "command": self.command, "date": self.date, "device": self.device, "versions": self.versions}
        return {**head, "rows": [row.to_dict() for row in self.rows]}

    def to_text(self) -> str:
        """The file's content as JSON, which UTF-8 can hold: of a path that is no UTF-8 the odd bytes are escaped."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")

    @classmethod
    def from_dict(cls, values: Any, source: str) -> Results:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: a key is missing, or ``met`` contradicts value and target; ``source`` is named.
        """
        try:
            rows = []
            for raw in values["rows"]:
                raw = dict(raw)
                met = raw.pop("met")
                row = Row(**raw)
                if met != row.met:
                    raise ValueError(f"row {row.name!r} says met={met}, but value {row.value} and target {row.target} say {row.met}")
                rows.append(row)
            names = ("bench", "command", "date", "device", "versions")
            return cls(**{name: values[name] for name in names}, rows=tuple(rows))
        except KeyError as error:
            raise ValueError(f"{source} is no result file: it lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source} is no result file: {error}") from None


def today() -> str:
    """yyyy-mm-dd."""
    return datetime.date.today().isoformat()


def slug(text: str) -> str:
    """``text`` as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def check_folder(path: str | None) -> None:
    """Make the folder for result files, before a benchmark runs for nothing.

    Raises:
        ValueError: it cannot be made or written, and why.
    """
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--results-dir {path} cannot be written: {error.strerror}") from None


def write_results(results: Results, folder: Path) -> Path:
    """Write ``<bench>-<device>-<date>.json`` into ``folder``; a number is added rather than overwriting a file.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(results.bench)}-{slug(results.device)}-{results.date}"
    text = results.to_text()
    number = 1
    while True:
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1


def read_results(path: Path) -> Results:
    """The results in a file.

    Raises:
        ValueError: not a result file.
        OSError: it cannot be read.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    return Results.from_dict(values, str(path))


def markdown(results: Results) -> str:
    """The results as a heading, the command, and a table."""
    rows = [_line(row) for row in results.rows]
    head = "| what | settings | value | peers | of the roof | target | met |\n| --- | --- | --- | --- | --- | --- | --- |"
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items() if version)
    title = f"### {results.bench}, {results.device}, {results.date}"
    return "\n".join([title, "", f"`{results.command}` ({versions})", "", head, *rows])


def _line(row: Row) -> str:
    params = ", ".join(f"{k} {v}" for k, v in row.params.items())
    peers = "; ".join(f"{name} {_number(value)}" for name, value in row.peers.items()) or "-"
    roof = "-" if row.roof is None else f"{100 * row.roof:.0f}%"
    sign = ">=" if row.better == "higher" else "<="
    target = "-" if row.target is None else f"{sign} {_number(row.target)}"
    met = "-" if row.met is None else "yes" if row.met else "no"
    return "| " + " | ".join([row.name, params, f"{_number(row.value)} {row.unit}", peers, roof, target, met]) + " |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def report(paths: Sequence[Path]) -> str:
    """The tables of several files, in the order of their names."""
    return "\n\n".join(markdown(read_results(path)) for path in sorted(paths))
