"""All cases: every module of this package with a ``cases`` function."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from .case import Case


def all_cases(only: str | None = None) -> list[Case]:
    """Cases whose operation or name contains one of the comma-separated parts of ``only``; all of them without it.

    Raises:
        ValueError: nothing matches; the operations are named.
    """
    package = import_module(__package__)
    cases: list[Case] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        make = getattr(import_module(f".{module}", __package__), "cases", None)
        if make is not None:
            cases += make()
    if only is None:
        return cases
    parts = [part.strip() for part in only.split(",") if part.strip()]
    found = [case for case in cases if any(part in case.op or part in case.name for part in parts)]
    if not found:
        raise ValueError(f"no kernel case matches {only!r}; operations: {', '.join(sorted({case.op for case in cases}))}")
    return found
