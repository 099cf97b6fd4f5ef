"""Recorded traffic in Mooncake's format: when requests came, how long they were, and which blocks of their prompts were the same.

A line is ``{"timestamp": MS, "input_length": N, "output_length": M, "hash_ids": [...]}``: each id stands for a block of the prompt, and
two requests whose ids begin alike begin alike. The texts are not published; blocks are made of random tokens, the same for the same id.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ....parallel.json_text import parse_json
from ...text_lines import numbered_lines
from .random_ids import draw_ids
from .request import Request

_COUNTS = ("input_length", "output_length")


def trace_requests(
    path: str, *, count: int | None, block: int, seconds_per_unit: float, vocab_size: int, seed: int, start: int = 0
) -> list[Request]:
    """Requests of a trace in the order of their arrival; the first that is taken arrives at 0.

    Args:
        path: JSON lines.
        count: how many, from line ``start`` on; None: all.
        block: tokens of the block that an id stands for (Mooncake: 512).
        seconds_per_unit: what a unit of ``timestamp`` is (Mooncake: 0.001), times how much slower it shall be replayed.

    Raises:
        ValueError: a line is no such entry, named with its number; or there is none.
        OSError: the file cannot be read.
    """
    if block < 1 or not seconds_per_unit > 0:
        raise ValueError(
            f"a trace needs blocks of 1 token or more and time that goes on, found {block} tokens, {seconds_per_unit} s a unit"
        )
    lines = numbered_lines(path)[start : None if count is None else start + count]
    entries = sorted((_entry(line, f"{path} line {number}", block) for number, line in lines), key=lambda entry: float(entry["timestamp"]))
    if not entries:
        raise ValueError(f"{path} holds no requests from line {start + 1} on")
    begin = float(entries[0]["timestamp"])
    return [
        Request(
            token_ids=_prompt(entry, number, block, vocab_size, seed),
            output_len=entry["output_length"],
            at=(float(entry["timestamp"]) - begin) * seconds_per_unit,
        )
        for number, entry in enumerate(entries)
    ]


def _entry(line: str, where: str, block: int) -> dict[str, Any]:
    try:
        entry = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, found {type(entry).__name__}")
    for name in _COUNTS:
        if type(entry.get(name)) is not int or entry[name] < 1:
            raise ValueError(f'{where}: "{name}" must be a whole number of 1 or more, found {entry.get(name)!r}')
    if type(entry.get("timestamp")) not in (int, float):
        raise ValueError(f'{where}: "timestamp" must be a number, found {entry.get("timestamp")!r}')
    ids = entry.setdefault("hash_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f'{where}: "hash_ids" must be a list of whole numbers')
    if len(ids) > -(-entry["input_length"] // block):
        raise ValueError(f"{where}: {len(ids)} blocks of {block} tokens are more than the prompt of {entry['input_length']} tokens has")
    return entry


def _prompt(entry: dict[str, Any], number: int, block: int, vocab_size: int, seed: int) -> list[int]:
    """The blocks that the ids name, then tokens of this request's own."""
    length: int = entry["input_length"]
    tokens: list[int] = []
    for one in entry["hash_ids"]:
        tokens += draw_ids(np.random.default_rng((seed, 1, one)), block, vocab_size)
    own = draw_ids(np.random.default_rng((seed, 2, number)), max(0, length - len(tokens)), vocab_size)
    return (tokens + own)[:length]
