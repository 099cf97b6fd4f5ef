"""Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def label_text(labels: Mapping[str, str]) -> str:
    """Labels as they stand between braces; values may hold anything."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class Exposition:
    """Families of metrics one after the other. A family has no line before its first sample."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []
        self._head = ""
        self._name = ""

    def family(self, kind: str, name: str, help: str) -> None:
        """What the next samples belong to. ``kind``: "gauge", "counter" (its name gets "_total") or "histogram"."""
        self._name = f"{self._prefix}{name}_total" if kind == "counter" else self._prefix + name
        text = help.replace("\\", "\\\\").replace("\n", "\\n")
        self._head = f"# HELP {self._name} {text}\n# TYPE {self._name} {kind}"

    def _begin(self) -> None:
        if self._head:
            self._lines.append(self._head)
            self._head = ""

    def sample(self, labels: str, value: float) -> None:
        """A value; ``labels``: see ``label_text``."""
        self._begin()
        self._lines.append(f"{self._name}{{{labels}}} {_number(value)}" if labels else f"{self._name} {_number(value)}")

    def histogram(self, labels: str, histogram: Mapping[str, Any]) -> None:
        """A histogram as ``serving.histogram.Histogram.to_wire`` gives it."""
        self._begin()
        name, before = self._name, labels + "," if labels else ""
        counts: Sequence[int] = list(accumulate(histogram["counts"]))
        for bound, count in zip(histogram["bounds"], counts, strict=False):
            self._lines.append(f'{name}_bucket{{{before}le="{bound:g}"}} {count}')
        own = f"{{{labels}}}" if labels else ""
        self._lines.append(f'{name}_bucket{{{before}le="+Inf"}} {counts[-1]}\n{name}_count{own} {counts[-1]}')
        self._lines.append(f"{name}_sum{own} {_number(histogram['sum'])}")

    def encode(self) -> bytes:
        """All of it."""
        return ("\n".join(self._lines) + "\n").encode()
