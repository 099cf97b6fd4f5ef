"""A dataclass field that is also a command-line flag, and checks that name it so; see ``launch.flags``. HTTP processes import it."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *aliases: str, choices: tuple[str, ...] | None = None, group: str = "engine") -> Any:
    """A dataclass field that is also a flag: ``--<field-name>`` and ``aliases``, with one line of help."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices, "group": group})


def flag_of(name: str) -> str:
    """``page_size`` -> ``--page-size``."""
    return "--" + name.replace("_", "-")


def check_least(settings: object, least: int, *names: str) -> None:
    """Refuse numbers below ``least``.

    Raises:
        ValueError: names the first by its flag.
    """
    for name in names:
        if getattr(settings, name) < least:
            raise ValueError(f"{flag_of(name)} must be at least {least}, found {getattr(settings, name)}")


def check_seconds(settings: object, *names: str) -> None:
    """Refuse times that are not above 0 and finite; None is none.

    Raises:
        ValueError: names the first by its flag.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{flag_of(name)} must be more than 0 seconds, found {value}")
