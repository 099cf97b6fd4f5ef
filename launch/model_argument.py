"""The model that a command works on, named as its first argument or by ``--model``."""

from __future__ import annotations

import argparse

from .flags import Parser


def add_model(parser: Parser, default: str | None = None) -> None:
    """The argument of ``model_of``; commands take ``--model`` among the engine's settings. ``default``: for the help."""
    otherwise = "" if default is None else f" (default: {default})"
    what = f"Folder of a checkpoint, a hub id, or 'tiny' (the embedded model).{otherwise}"
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=what)


def model_of(args: argparse.Namespace, default: str | None = None) -> str:
    """The model; ``default`` where none is named.

    Raises:
        ValueError: none, or two different ones.
    """
    named, flagged = args.model_name, getattr(args, "model", None)
    if named and flagged and named != flagged:
        raise ValueError(f"two models were named: {named!r} and --model {flagged!r}; give one")
    found = named or flagged or default
    if not found:
        raise ValueError("no model; give a folder, a hub id or 'tiny' as the first argument (before --prompt)")
    return str(found)
