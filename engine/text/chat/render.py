"""Which chat format a model has, and rendering with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..tokenizer import read_json_object
from .conversation import Conversation
from .deepseek_v32 import DeepseekV32ChatFormat
from .messages import Message
from .template import JinjaChatFormat, find_template, special_tokens_of


class ChatFormat(Protocol):
    """From a conversation to the text of a prompt."""

    def render(self, talk: Conversation) -> str:
        """The prompt.

        Raises:
            ValueError: the format cannot express the conversation.
        """


def load_chat_format(folder: str | Path, *, model_type: str | None = None, with_tools: bool = False) -> ChatFormat:
    """The chat format of a model.

    A jinja template in ``folder`` comes first; otherwise ``model_type`` (by default that of ``config.json``) decides, and
    deepseek_v32 has a format of its own.

    Raises:
        ValueError: the model has no chat format, or its template is broken.
    """
    folder = Path(folder)
    source = find_template(folder, with_tools=with_tools)
    if source is not None:
        return JinjaChatFormat(source, special_tokens_of(folder), str(folder))
    if model_type is None:
        model_type = read_json_object(folder / "config.json").get("model_type")
    if model_type == "deepseek_v32":
        return DeepseekV32ChatFormat()
    raise ValueError(
        f"{folder} has no chat format: no chat_template.jinja, no chat_template in tokenizer_config.json, and model type "
        f"{model_type!r} has none built in (deepseek_v32 has); give a plain prompt instead of messages"
    )


def render_chat(
    folder: str | Path,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    thinking: bool = False,
    add_generation_prompt: bool = True,
    model_type: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a chat, special tokens included: encode it with ``add_special_tokens=False``.

    Args:
        folder: the tokenizer's folder.
        messages: ``{"role", "content"}`` dicts, as in OpenAI's chat API; assistant messages may have ``reasoning_content``
            and ``tool_calls``.
        tools: function descriptions, as in OpenAI's chat API.
        thinking: ask for reasoning before the answer, where the format knows the difference.
        add_generation_prompt: end with the opening of the assistant's turn.
        chat_template_kwargs: more variables for the template; ``thinking`` and ``enable_thinking`` among them come first.
        model_type: decides where the folder has no template; that of its ``config.json`` by default.

    Raises:
        ValueError: bad messages or tools, or a model without a chat format.
    """
    args = dict(chat_template_kwargs or {})
    thinking = bool(args.pop("thinking", args.pop("enable_thinking", thinking)))
    talk = Conversation.checked(
        messages, tools, thinking=thinking, add_generation_prompt=add_generation_prompt, template_args=args
    )  # fmt: skip
    return load_chat_format(folder, model_type=model_type, with_tools=bool(talk.tools)).render(talk)
