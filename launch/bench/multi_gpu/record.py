"""The result file of the run, written anew after every part, so that whatever ends the run leaves what was measured until then."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...doctor import versions
from ..results import Results, Row, command_line, today, write_results
from .parts import Outcome, Part, replace_file


class Record:
    """What came of the parts so far, on file."""

    def __init__(self, args: argparse.Namespace, ranks: int, device: str, parts: Sequence[Part]) -> None:
        self.outcomes: list[Outcome] = []
        self._ranks, self._device, self._parts = ranks, device, parts
        self._versions = versions()
        self._places = [Path(args.output_json)] if args.output_json else []
        self._folder = Path(args.results_dir) if args.results_dir else None

    def add(self, outcome: Outcome) -> None:
        """One more part; the file holds it when this returns."""
        self.outcomes.append(outcome)
        self.write()

    def write(self) -> None:
        """Write what there is. A place that has become unwritable is replaced by one in the folder for temporary files, and said."""
        results = self._results()
        if self._folder is not None:
            try:
                self._places.append(write_results(results, self._folder))  # a name of its own, that of an earlier run stays
            except OSError as error:
                self._places.append(_elsewhere(self._folder, error))
            self._folder = None
        text = results.to_text()
        for number, place in enumerate(self._places):
            try:
                replace_file(place, text)
            except OSError as error:
                self._places[number] = _elsewhere(place, error)
                replace_file(self._places[number], text)

    def told(self) -> str:
        """Where the file is."""
        return "".join(f"wrote {place}\n" for place in self._places)

    def _results(self) -> Results:
        return Results(
            bench="multi-gpu", command=command_line(), date=today(), device=self._device, versions=self._versions, rows=tuple(self.rows())
        )

    def rows(self) -> list[Row]:
        """Parts and how they ended, those that are still to come among them; then their figures."""
        begun = [_part_row(o.part, o.seconds, o.note) for o in self.outcomes]
        waiting = [_part_row(part, 0.0, "not begun: the run ended before it") for part in self._parts[len(self.outcomes) :]]
        return [*begun, *waiting, *_scaling(self.outcomes, self._ranks), *with_peers([r for o in self.outcomes for r in o.rows])]


#: settings of an exchange's row that say how a backend does it, not what
_HOW = ("backend", "timed", "link_bytes", "results", "counted", "torch_timed")


def with_peers(rows: Sequence[Row]) -> list[Row]:
    """``rows`` of exchanges with the same figure of the backends that other parts measured."""

    def key(row: Row) -> str:
        return json.dumps([row.name, {k: v for k, v in row.params.items() if k not in _HOW}], sort_keys=True)

    others: dict[str, dict[str, float]] = {}
    for row in rows:
        if "backend" in row.params:
            others.setdefault(key(row), {})[row.params["backend"]] = row.value
    return [
        replace(row, peers={**row.peers, **{n: v for n, v in others[key(row)].items() if n != row.params["backend"]}})
        if "backend" in row.params else row
        for row in rows
    ]  # fmt: skip


def _part_row(part: Part, seconds: float, note: str) -> Row:
    params = {"ended": note, "ranks": part.ranks, "limit_s": part.limit_s}
    return Row(name=f"part: {part.name}", params=params, value=round(seconds, 1), unit="s", better="lower")


def _scaling(outcomes: Sequence[Outcome], ranks: int) -> list[Row]:
    """Throughput of all GPUs over that of so many alone, each with its share of the experts, which has nothing to exchange."""
    found = {o.part.name: o.rows[0].value for o in outcomes if o.part.module.endswith(".slice") and o.rows}
    alone, together = found.get("one GPU with its share of the experts"), found.get("experts over all GPUs")
    if not alone or together is None:
        return []
    name, value = "throughput over that of as many GPUs alone", together / (ranks * alone)
    return [Row(name=name, params={"ranks": ranks}, value=value, unit="times", better="higher")]


def _elsewhere(place: Path, error: OSError) -> Path:
    """A file that can be written in place of ``place``."""
    found = Path(tempfile.mkdtemp(prefix="rorqual-multi-gpu-")) / "multi-gpu.json"
    print(f"{place} cannot be written any more ({error.strerror}): results go to {found}", file=sys.stderr, flush=True)
    return found
