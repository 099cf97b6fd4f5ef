"""``--config FILE``: settings of a command from a JSON or YAML file. What is typed on the command line wins."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from ..parallel.json_text import TOO_DEEP, parse_json


def read_config(path: str) -> dict[str, Any]:
    """The mapping in a ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        ValueError: not a mapping, not readable as its format, or YAML without PyYAML.
        OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith((".yaml", ".yml")):
        values = _yaml(path, text)
    else:
        try:
            values = parse_json(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}); name a YAML file .yaml") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of flags to values, found {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{path}: reading YAML needs PyYAML (pip install pyyaml); JSON works without it") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({error})") from None
    except RecursionError:
        raise ValueError(f"{path} is not YAML ({TOO_DEEP})") from None


def as_arguments(parser: argparse.ArgumentParser, values: dict[str, Any], source: str) -> list[str]:
    """The settings as command-line arguments of ``parser``, to go before those that were typed.

    Keys are flags without dashes, ``_`` and ``-`` alike; true and false switch a flag on and off, null leaves it alone.

    Raises:
        ValueError: a key that is no flag of this command (the nearest one is named), or a value of the wrong kind.
    """
    flags = {s: action for action in parser._actions for s in action.option_strings}
    words: list[str] = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-").lstrip("-")
        if flag not in flags or flag in ("--config", "--help"):
            near = difflib.get_close_matches(flag, [f for f in flags if f.startswith("--")], n=1)
            hint = f"; did you mean {near[0][2:]!r}?" if near else ""
            raise ValueError(f"{source}: {key!r} is no setting of `{parser.prog}`{hint}")
        words += _words(flag, flags, value, f"{source}: {key!r}")
    return words


def _words(flag: str, flags: dict[str, argparse.Action], value: Any, where: str) -> list[str]:
    takes_value = flags[flag].nargs != 0
    if value is None:
        return []
    if not takes_value:
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, found {value!r}")
        negative = "--no-" + flag[2:]
        return [flag] if value else [negative] if negative in flags else []
    if isinstance(value, dict) and flag == "--eplb-config":
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, (bool, dict)):
        raise ValueError(f"{where} must be a value, found {value!r}")
    if isinstance(value, list):
        if flags[flag].nargs != "+":
            raise ValueError(f"{where} takes one value, found a list of {len(value)}")
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={value}"]
