"""What a chat format renders: the messages of a conversation, checked, and how its prompt shall be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .messages import Message, check_messages, check_tools


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One prompt to be. Made by ``checked``."""

    messages: list[Message]  # with contents and arguments as ``check_messages`` gives them
    tools: list[dict[str, Any]]  # function descriptions, as in OpenAI's chat API
    thinking: bool | None = None  # ask for reasoning before the answer, or for none; None: as the format has it
    add_generation_prompt: bool = True  # end with the opening of the assistant's turn
    template_args: Mapping[str, Any] = field(default_factory=dict)  # more variables for a template

    @classmethod
    def checked(cls, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, **how: Any) -> Conversation:
        """The conversation; ``how``: the other fields.

        Raises:
            ValueError: no messages, or malformed messages or tools; names the first.
        """
        return cls(messages=check_messages(messages), tools=check_tools(tools), **how)
