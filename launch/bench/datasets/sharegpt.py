"""Conversations of a file in the ShareGPT format: the first turn of each, and how long its answer was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ....parallel.json_text import parse_json
from .request import Encode, Request

#: prompts and answers shorter than this many tokens are left out, and longer ones than these; as vLLM does
LEAST, LONGEST_PROMPT, LONGEST_TOTAL = 4, 1024, 2048


def sharegpt_requests(
    path: str, *, count: int, output_len: int | None, seed: int, encode: Encode, shuffle: bool = True, oversample: bool = True
) -> list[Request]:
    """``count`` requests of a ShareGPT file, drawn without order; the file is gone through again when it has too few.

    Args:
        path: JSON list of {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}, ...]}.
        output_len: tokens to generate; None: as many as the answer in the file has.
        encode: text to token ids.
        oversample: go through the file again; otherwise there are fewer requests.

    Raises:
        ValueError: the file is no such list, or holds no conversation of a usable length.
        OSError: it cannot be read.
    """
    talks = [pair for pair in map(_first_turns, _entries(path)) if pair is not None]
    if shuffle:
        np.random.default_rng(seed).shuffle(talks)
    found: list[Request] = []
    for prompt, answer in talks:
        if len(found) == count:
            break
        ids, length = encode(prompt), len(encode(answer))
        if min(len(ids), length) < LEAST or len(ids) > LONGEST_PROMPT or len(ids) + length > LONGEST_TOTAL:
            continue
        found.append(Request(token_ids=ids, text=prompt, output_len=output_len or length))
    if not found:
        raise ValueError(
            f"{path}: none of {len(talks)} conversations has a prompt of {LEAST} to {LONGEST_PROMPT} tokens and an answer of "
            f"{LEAST} or more, {LONGEST_TOTAL} at most together"
        )
    more = count if oversample else len(found)
    return [found[i % len(found)] for i in range(more)]


def _entries(path: str) -> list[Any]:
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, list):
        raise ValueError(f"{path} must be a JSON list of conversations, found {type(values).__name__}")
    return values


def _first_turns(entry: Any) -> tuple[str, str] | None:
    """Prompt and answer of an entry; None for one that has no two turns of text."""
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2]]
    return (texts[0], texts[1]) if isinstance(texts[0], str) and isinstance(texts[1], str) else None
