"""Jinja chat templates of Hugging Face folders, run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tokenizer import read_json_object
from .conversation import Conversation
from .messages import Message

#: what template code may raise beside jinja's own errors, e.g. adding None to a string
_TEMPLATE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError, ZeroDivisionError)
#: ``chat_template_kwargs`` that clients send to models of every kind: without meaning where the template does not read them
OPTIONAL_ARGS = frozenset({"thinking", "enable_thinking", "reasoning_effort", "clear_thinking", "preserve_thinking"})
#: names that templates find in their environment
_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"})


class JinjaChatFormat:
    """One compiled chat template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str], origin: str) -> None:
        """``origin`` says in errors where the template came from. ValueError for a syntax error."""
        import jinja2
        import jinja2.meta

        self.source = source
        self._special_tokens, self._origin = special_tokens, origin
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            #: names that the template reads
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {origin} cannot be compiled: {error}") from error

    def render(self, talk: Conversation) -> str:
        """The prompt. With ``thinking`` None the template's own default holds.

        Raises:
            ValueError: the template refuses the messages, or has no place for the tools, calls or results that they bring.
        """
        import jinja2

        self._check(talk)
        values = {
            **talk.template_args,
            "messages": self._known_roles(talk.messages),
            "tools": talk.tools or None,
            "documents": None,
            "add_generation_prompt": talk.add_generation_prompt,
        }
        if talk.thinking is not None:
            values["thinking"] = values["enable_thinking"] = talk.thinking  # DeepSeek's name, GLM's name
        try:
            return str(self._template.render(**self._special_tokens, **values))
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise ValueError(f"the chat template of {self._origin} refused the messages: {error}") from error

    def _known_roles(self, messages: Sequence[Message]) -> list[Message]:
        """The messages; those of a developer are the system's in templates that do not know the role and would leave them out."""
        if "developer" in self.source:
            return list(messages)
        return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]

    def _check(self, talk: Conversation) -> None:
        """Raise ValueError for what the template would leave out of the prompt without a word."""
        fix = "; give another template with --chat-template"
        if talk.tools and "tools" not in self.source:
            raise ValueError(f"the chat template of {self._origin} has no place for tools{fix}")
        for index, message in enumerate(talk.messages):
            if message.get("tool_calls") and "tool_calls" not in self.source:
                raise ValueError(f"message {index}: the chat template of {self._origin} has no place for tool_calls{fix}")
            if message["role"] == "tool" and "tool" not in self.source:
                raise ValueError(f"message {index}: the chat template of {self._origin} has no place for tool results{fix}")
        own = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens} & talk.template_args.keys()
        if own:
            raise ValueError(f"chat_template_kwargs must not have {', '.join(sorted(own))}, which the server sets itself")
        unknown = talk.template_args.keys() - self.variables - OPTIONAL_ARGS
        if unknown:
            known = ", ".join(sorted(self.variables - {"messages", "tools", "add_generation_prompt", *self._special_tokens, *_FUNCTIONS}))
            raise ValueError(
                f"chat_template_kwargs has {', '.join(sorted(unknown))}; the template of {self._origin} reads {known or 'none'}"
            )


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
