"""The chat format of a server: found once, then used for every request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tokenizer import Tokenizer
from .conversation import Conversation
from .deepseek_v32 import THINK, THINK_END
from .messages import Message, check_messages
from .render import ChatFormat, load_chat_format
from .template import JinjaChatFormat, find_template, special_tokens_of

#: how special tokens look in templates
_TOKEN = re.compile(r"<[|｜][^<>|｜\s'\"{}]+[|｜]>")


class ChatRenderer:
    """Renders conversations for one model; thread-safe."""

    def __init__(
        self,
        folder: str | Path,
        *,
        model_type: str | None = None,
        template_file: str | Path | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """``folder`` of the tokenizer; ``template_file`` replaces its template.

        A model without a chat format is no error before a chat is rendered.

        Raises:
            ValueError: a template that cannot be read or compiled, or a ``template_file`` that writes special tokens which
                ``tokenizer`` does not have: it was made for another model.
        """
        self._folder, self._model_type = Path(folder), model_type
        self._formats: dict[bool, ChatFormat] = {}
        self._given: JinjaChatFormat | None = None
        if template_file is not None:
            source = _read(Path(template_file))
            if tokenizer is not None:
                _check_tokens(source, tokenizer, Path(template_file))
            self._given = JinjaChatFormat(source, special_tokens_of(self._folder), str(template_file))
        elif find_template(self._folder, with_tools=True) is not None:
            self._format(with_tools=True)  # a broken template is told at the start

    @property
    def source(self) -> str | None:
        """The jinja template for prompts with tools; None for a model without one, or with a format of its own."""
        return self._given.source if self._given is not None else find_template(self._folder, with_tools=True)

    @property
    def built_in(self) -> bool:
        """True for a model whose format is no template but part of this package."""
        return self.source is None and self._model_type == "deepseek_v32"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation, special tokens included.

        Args:
            messages: as in OpenAI's chat API.
            tools: as in OpenAI's chat API.
            template_args: ``chat_template_kwargs``; ``thinking`` (or ``enable_thinking``) asks for reasoning, or for none.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: the last message is the beginning of the assistant's answer, which the model goes on with;
                reasoning is closed before it.

        Raises:
            ValueError: malformed messages or tools, or what the model's format cannot express.
        """
        if continue_final_message:
            last = check_messages(messages)[-1]
            if last["role"] != "assistant" or not last["content"] or last.get("tool_calls") or len(messages) < 2:
                raise ValueError("continue_final_message needs a last message of the assistant with text, after another")
            prompt = self.render(messages[:-1], tools=tools, template_args=template_args)
            if prompt.rstrip().endswith(THINK):
                prompt += (last.get("reasoning_content") or "") + THINK_END
            return prompt + str(last["content"])
        args = dict(template_args or {})
        switches = {name: args.pop(name) for name in ("thinking", "enable_thinking") if args.get(name) is not None}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"chat_template_kwargs: {name} must be true or false, found {value!r}")
        if len(set(switches.values())) > 1:
            raise ValueError("chat_template_kwargs: thinking and enable_thinking contradict each other")
        thinking = next(iter(switches.values()), None)
        talk = Conversation.checked(
            messages, tools, thinking=thinking, add_generation_prompt=add_generation_prompt, template_args=args
        )  # fmt: skip
        return self._format(with_tools=bool(talk.tools)).render(talk)

    def _format(self, *, with_tools: bool) -> ChatFormat:
        if self._given is not None:
            return self._given
        found = self._formats.get(with_tools)
        if found is None:
            found = self._formats[with_tools] = load_chat_format(self._folder, model_type=self._model_type, with_tools=with_tools)
        return found


def _read(path: Path) -> str:
    """The text of a template file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {path} cannot be read: {error}") from error


def _check_tokens(source: str, tokenizer: Tokenizer, path: Path) -> None:
    """Raise ValueError for special tokens that the tokenizer would cut into pieces, and the model has never seen."""
    unknown = sorted({token for token in _TOKEN.findall(source) if tokenizer.token_to_id(token) is None})
    if unknown:
        shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ValueError(
            f"--chat-template {path} writes {shown}, which this model's tokenizer does not have as tokens: it is the template of "
            "another model; leave --chat-template out, or give this model's"
        )
