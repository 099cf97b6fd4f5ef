"""Command-line flags made from a config dataclass, so that flags and settings cannot drift apart."""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from ..engine.option import flag_of


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are ValueErrors."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with argparse's message and where to look."""
        raise ValueError(f"{message} (see `{self.prog} --help`)")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Another system's flag for a setting of ours."""

    flag: str  # the flag, with its dashes
    field: str | None  # the field it sets; None when it states what is so anyway
    value: Any = True  # the value it sets
    help: str  # one line


#: spellings of vLLM and SGLang that are no plain alias of one field
SPELLINGS = (
    Spelling(flag="--disable-radix-cache", field="enable_prefix_caching", value=False, help="The same as --no-enable-prefix-caching."),
    Spelling(flag="--enable-expert-parallel", field=None, help="Accepted: experts are spread over all dp x tp ranks anyway."),
    Spelling(flag="--enable-dp-attention", field=None, help="Accepted: --dp-size always means ranks with requests of their own."),
)


def value_type(annotation: Any) -> tuple[Any, bool]:
    """The type of an annotation such as ``int`` or ``int | None`` without its None, and whether None is allowed."""
    if get_origin(annotation) in (types.UnionType, Union):
        plain = [t for t in get_args(annotation) if t is not type(None)]
        assert len(plain) == 1, f"a flag has one type, found {annotation}"
        return plain[0], True
    return annotation, False


def add_options(parser: argparse.ArgumentParser, config: type, *, skip: Sequence[str] = ()) -> None:
    """Add a flag for every field of ``config`` that has ``option`` metadata, in the groups that the fields name.

    Flags have no default: a namespace holds only what was given, and the dataclass keeps the defaults.
    """
    hints = get_type_hints(config)
    groups: dict[str, Any] = {}
    for entry in fields(config):
        if "help" not in entry.metadata or entry.name in skip:
            continue
        title = entry.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], entry, hints[entry.name])


def _add_option(group: Any, entry: Field[Any], annotation: Any) -> None:
    plain, _ = value_type(annotation)
    assert entry.default is not MISSING
    shown = entry.metadata["help"] if entry.default is None else f"{entry.metadata['help']} (default: {_show(entry.default)})"
    common: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    names = [flag_of(entry.name), *entry.metadata["aliases"]]
    if plain is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        return
    if get_origin(plain) is tuple:  # tuple[int, ...]: one or more values
        group.add_argument(*names, type=get_args(plain)[0], nargs="+", action="extend", metavar="N", **common)
        return
    choices = entry.metadata["choices"]
    meta = None if choices else {int: "N", float: "X", str: "TEXT"}[plain]
    group.add_argument(*names, type=plain, choices=choices, metavar=meta, **common)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return repr(value) if value == "" else str(value)


def add_spellings(parser: argparse.ArgumentParser) -> None:
    """Add ``SPELLINGS``."""
    group = parser.add_argument_group("spellings of other systems")
    for spelling in SPELLINGS:
        dest = spelling.field or "_accepted"
        group.add_argument(
            spelling.flag, dest=dest, action="store_const", const=spelling.value, default=argparse.SUPPRESS, help=spelling.help
        )


def chosen(namespace: argparse.Namespace, config: type, *, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of ``config`` that were given, by field name."""
    names = {entry.name for entry in fields(config)} - set(skip)
    return {name: value for name, value in vars(namespace).items() if name in names}
