"""Jinja chat templates of Hugging Face folders, run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tokenizer import read_json_object
from .messages import Message

#: what template code may raise beside jinja's own errors, e.g. adding None to a string
_TEMPLATE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)


class JinjaChatFormat:
    """One compiled chat template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str], origin: str) -> None:
        """``origin`` says in errors where the template came from. ValueError for a syntax error."""
        import jinja2

        self._special_tokens, self._origin = special_tokens, origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {origin} cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]], thinking: bool, add_generation_prompt: bool) -> str:
        """The prompt; ValueError when the template refuses the messages."""
        import jinja2

        values = {
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "thinking": thinking,  # DeepSeek's name
            "enable_thinking": thinking,  # GLM's name
        }
        try:
            return str(self._template.render(**self._special_tokens, **values))
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise ValueError(f"the chat template of {self._origin} refused the messages: {error}") from error


def find_template(folder: Path, *, with_tools: bool) -> str | None:
    """Source of the folder's chat template: ``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``.

    The latter may be a list of named templates; "tool_use" is taken for prompts with tools, otherwise "default".
    ValueError when it is of another kind.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        chosen = (named.get("tool_use") if with_tools else None) or named.get("default")
        if isinstance(chosen, str):
            return chosen
        raise ValueError(f"chat_template of {folder / 'tokenizer_config.json'} names {sorted(map(str, named))} but no 'default'")
    raise ValueError(f"chat_template of {folder / 'tokenizer_config.json'} must be a string or a list, found {type(template).__name__}")


def special_tokens_of(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, as templates use them."""
    tokens: dict[str, str] = {"bos_token": "", "eos_token": ""}
    for name, value in read_json_object(folder / "tokenizer_config.json").items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def _environment() -> Any:
    """The jinja environment that Hugging Face templates expect: same white space rules, filters and functions."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(layout: str) -> str:
        return datetime.datetime.now().strftime(layout)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
