"""Text to tokens and back in an HTTP process: the tokenizer and the chat format of the served model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..text.chat import ChatRenderer
from ..text.tokenizer import LONG, Tokenizer
from .errors import ApiError

T = TypeVar("T")


class Texts:
    """Tokenises prompts, renders chats, spells tokens."""

    tokenizer: Tokenizer | None  # None: this server works on token ids only

    def __init__(self, folder: str, *, model_type: str, chat_template: str | None = None) -> None:
        """``folder`` of the tokenizer, "" for none; ``chat_template`` is a file that replaces the folder's template.

        Raises:
            ValueError: the tokenizer or the template is missing or unreadable.
        """
        self.folder, self.model_type = folder, model_type
        self.tokenizer = Tokenizer.load(folder) if folder else None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        self._chat = ChatRenderer(folder, model_type=model_type, template_file=chat_template, tokenizer=self.tokenizer) if folder else None
        self._spellings: dict[int, tuple[str, bytes]] = {}
        self._longest = 0
        if self.tokenizer is not None:
            self._longest = max((len(self.tokenizer.id_to_token(i) or "") for i in range(self.tokenizer.vocab_size)), default=0)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What ``work`` gives; it takes long, and would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; ApiError 400 when this server has none."""
        if self.tokenizer is None:
            raise ApiError(400, f"{what} needs a tokenizer and this server has none (--skip-tokenizer-init); send token ids as the prompt")
        return self.tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of a text. With ``most``, a text that must have more tokens is refused before it is tokenised.

        Raises:
            ApiError: 400, no tokenizer, no text, or longer than ``most`` tokens.
        """
        tokenizer = self.need_tokenizer("a prompt of text")
        if most is not None and self._longest and len(text) > most * self._longest:
            raise ApiError(400, f"the prompt has {len(text)} characters, more than the {most} tokens that the model takes can stand for")
        try:
            if len(text) < LONG:  # a longer one would hold up the event loop
                return tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return await self.in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""
        return self.need_tokenizer("text").decode(ids, skip_special_tokens=skip_special_tokens)

    async def decode_long(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """``decode`` of ids that may be many: in a thread then."""
        if len(ids) < LONG:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)
        tokenizer = self.need_tokenizer("text")
        return await self.in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def spelling(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of one token; the text has U+FFFD where the bytes are no whole character."""
        found = self._spellings.get(token)
        if found is None:
            found = self._spellings[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> tuple[str, bytes]:
        if self.tokenizer is None:
            return f"token_id:{token}", b""
        if self.tokenizer.is_byte_level:
            data = self.tokenizer.token_bytes(token)
            return data.decode("utf-8", "replace"), data
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return text, text.encode("utf-8", "replace")

    @property
    def is_byte_level(self) -> bool:
        """True when the text is the tokens' bytes one after the other."""
        return self.tokenizer is not None and self.tokenizer.is_byte_level

    def is_special(self, token: int) -> bool:
        """True for tokens that ``skip_special_tokens`` leaves out."""
        return self.tokenizer is not None and self.tokenizer.is_special(token)

    def special_tokens(self) -> set[str]:
        """Spellings of the tokens that ``skip_special_tokens`` leaves out."""
        return {self.tokenizer.id_to_token(i) or "" for i in self.tokenizer.special_ids} if self.tokenizer is not None else set()

    # ---- chats

    def template_source(self) -> str | None:
        """The jinja chat template; None when there is none."""
        return self._chat.source if self._chat is not None else None

    async def render(
        self,
        size: int,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        template_args: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation that came as ``size`` bytes; a long one is rendered in a thread.

        Raises:
            ApiError: 400, messages or tools are malformed, or the model has no chat format.
        """
        self.need_tokenizer("a chat")
        assert self._chat is not None
        render = partial(
            self._chat.render, messages, tools=tools, template_args=template_args, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )  # fmt: skip
        try:
            return render() if size < LONG else await self.in_thread(render)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, str(error) or "the messages are nested too deeply", param="messages") from None
