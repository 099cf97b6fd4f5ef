"""A hook of mkdocs: a copy of the package under its name, for docstrings (the repository has a .venv inside), and tables of flags."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine",)  # what pages under api/ show


def on_startup(**_: Any) -> None:
    """Make build/package/rorqual anew, before mkdocstrings looks for it: what it misses there it seeks in the whole repository."""
    package = ROOT / "build" / "package" / "rorqual"
    shutil.rmtree(package, ignore_errors=True)
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__", "*.json", "*.html", "kernels"))
    shutil.copy(ROOT / "__init__.py", package / "__init__.py")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A table of flags in the place of each ``<!-- flags of module:Class -->``."""
    return re.sub(r"<!-- flags of (\S+):(\w+) -->", lambda found: _flags(found[1], found[2]), markdown)


def _flags(module: str, name: str) -> str:
    from rorqual.engine.option import flag_of
    from rorqual.launch.flags import _show

    lines = ["| setting | flags | default | meaning |", "| --- | --- | --- | --- |"]
    for entry in fields(getattr(import_module(module), name)):
        if "help" in entry.metadata:
            flags = ", ".join(f"`{flag}`" for flag in (flag_of(entry.name), *entry.metadata["aliases"]))
            default = "" if entry.default is None else f"`{_show(entry.default)}`"
            lines.append(f"| `{entry.name}` | {flags} | {default} | {entry.metadata['help'].replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
