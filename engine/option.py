"""A dataclass field that is also a command-line flag; see ``launch.flags``. Imports nothing heavy: HTTP processes use it."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *aliases: str, choices: tuple[str, ...] | None = None, group: str = "engine") -> Any:
    """A dataclass field that is also a flag: ``--<field-name>`` and ``aliases``, with one line of help."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices, "group": group})
