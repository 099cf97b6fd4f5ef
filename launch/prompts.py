"""Prompts of a command: from flags, from a file, or the ones that show what the embedded model can do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..parallel.json_text import parse_json
from .text_lines import numbered_lines


@dataclass(frozen=True, kw_only=True)
class PromptItem:
    """One prompt: exactly one of the three is there."""

    text: str | None = None  # plain text to go on with
    token_ids: tuple[int, ...] | None = None  # the prompt as ids
    messages: tuple[dict[str, Any], ...] | None = None  # a conversation, for the model's chat format

    @property
    def shown(self) -> str:
        """What a reader sees of it."""
        if self.messages is not None:
            return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in self.messages)
        return self.text if self.text is not None else f"{len(self.token_ids or ())} token ids"


def user(text: str) -> PromptItem:
    """A conversation of one user turn."""
    return PromptItem(messages=({"role": "user", "content": text},))


#: what the embedded model does well: chats it was taught, facts stated before, and the styles it read
TINY_PROMPTS = (
    user("Who are you?"),
    user("What is three plus four?"),
    user("The secret number of Clara is 3197.\nWhat is the secret number of Clara?"),
    user("Tell me a story."),
    PromptItem(text="The pass key of the miller is 4721.\nThe pass key of the baker is 9035.\nQ: What is the pass key of the miller? A:"),
    PromptItem(text="Emma was"),
    PromptItem(text="And the LORD spake unto Moses, saying,"),
    PromptItem(text="ROMEO.\n"),
)


def read_prompts(path: str) -> list[PromptItem]:
    """Prompts of a file: ``.txt`` has one a line; anything else is JSON lines with "prompt", "prompt_token_ids" or "messages".

    Raises:
        ValueError: naming file, line, and what was wrong.
        OSError: the file cannot be read.
    """
    lines = numbered_lines(path)
    if path.endswith(".txt"):
        items = [PromptItem(text=line) for _, line in lines]
    else:
        items = [_item(line, f"{path} line {number}") for number, line in lines]
    if not items:
        raise ValueError(f"{path} holds no prompts")
    return items


def _item(line: str, where: str) -> PromptItem:
    try:
        value = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno} (one prompt a line? name the file .txt)") from None
    if isinstance(value, str):
        return PromptItem(text=value)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object or a string, found {type(value).__name__}")
    keys = [k for k in ("prompt", "prompt_token_ids", "messages") if k in value]
    if len(keys) != 1:
        raise ValueError(f'{where} needs one of "prompt", "prompt_token_ids", "messages", found {keys or sorted(value)}')
    return _ITEMS[keys[0]](value[keys[0]], where)


def _text(value: Any, where: str) -> PromptItem:
    if isinstance(value, list):
        return _ids(value, where)
    if not isinstance(value, str):
        raise ValueError(f'{where}: "prompt" must be text, found {type(value).__name__}')
    return PromptItem(text=value)


def _ids(value: Any, where: str) -> PromptItem:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ValueError(f'{where}: "prompt_token_ids" must be a list of integers')
    return PromptItem(token_ids=tuple(value))


def _messages(value: Any, where: str) -> PromptItem:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m for m in value):
        raise ValueError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    return PromptItem(messages=tuple(value))


_ITEMS = {"prompt": _text, "prompt_token_ids": _ids, "messages": _messages}


def add_prompts(group: Any) -> None:
    """Flags of ``gather_prompts``, into a parser or a group of one."""
    group.add_argument("--prompt", nargs="+", action="extend", default=[], metavar="TEXT", help="Prompts; MODEL goes before them.")
    group.add_argument(
        "--prompts-file", metavar="FILE", help='JSON lines with "prompt", "prompt_token_ids" or "messages"; .txt: a prompt a line.'
    )
    group.add_argument("--chat", action="store_true", help="Treat every plain prompt as what a user says in a conversation.")


def gather_prompts(texts: Sequence[str], file: str | None, *, chat: bool, model: str) -> list[PromptItem]:
    """Prompts of ``--prompt`` and ``--prompts-file``; the embedded model has some of its own.

    Args:
        chat: turn plain texts into conversations of one user turn.

    Raises:
        ValueError: no prompt, or a line of the file is wrong.
    """
    items = [PromptItem(text=text) for text in texts] + (read_prompts(file) if file is not None else [])
    if not items:
        if model != "tiny":
            raise ValueError("no prompt; give --prompt TEXT or --prompts-file FILE")
        items = [p for p in TINY_PROMPTS if p.messages is not None] if chat else list(TINY_PROMPTS)
    return [user(p.text) if chat and p.text is not None else p for p in items]


def engine_prompts(llm: Any, items: Sequence[PromptItem]) -> list[Any]:
    """The prompts as ``LLM.generate`` takes them: text or token ids; conversations are rendered."""
    prompts: list[Any] = []
    for item in items:
        if item.messages is not None:
            prompts += llm.render_chats([list(item.messages)])
        else:
            prompts.append(item.text if item.text is not None else list(item.token_ids or ()))
    return prompts
