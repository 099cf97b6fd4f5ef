"""Requests as HTTP bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..datasets.request import Request, Turn
from .config import ServeBenchConfig, TargetConfig
from .outcome import Outcome

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
#: backends whose servers know fields beyond OpenAI's
EXTENDED = ("rorqual", "vllm", "sglang")


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Makes the body of each request."""

    model: str
    endpoint: str
    chat: bool
    as_ids: bool  # prompts as token ids
    common: dict[str, Any]  # what all requests have

    @classmethod
    def of(cls, target: TargetConfig, load: ServeBenchConfig, model: str, *, as_ids: bool, want_ids: bool) -> Asker:
        """As the flags say.

        Args:
            as_ids: send prompts as token ids.
            want_ids: token ids of answers are needed.

        Raises:
            ValueError: token ids cannot be sent to, or had from, this backend.
        """
        chat = target.backend == "openai-chat"
        if chat and as_ids:
            raise ValueError("--backend openai-chat sends text, and this dataset is token ids; give --tokenizer FOLDER, or another backend")
        common: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        common |= {name: value for name in _SAMPLING if (value := getattr(load, name)) is not None}
        if load.ignore_eos if load.ignore_eos is not None else target.backend in EXTENDED:
            common["ignore_eos"] = True
        if load.logprobs is not None:
            common |= {"logprobs": True, "top_logprobs": load.logprobs} if chat else {"logprobs": load.logprobs}
        if load.return_token_ids or (want_ids and target.backend in EXTENDED):
            common["return_token_ids"] = True
        endpoint = target.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
        return cls(model=model, endpoint=endpoint, chat=chat, as_ids=as_ids, common={**common, **load.body})

    def body(self, prompt: Any, output_len: int) -> bytes:
        """The body for a prompt: ids, text, or messages with chat."""
        value: dict[str, Any] = {"model": self.model, "messages" if self.chat else "prompt": prompt}
        value["max_completion_tokens" if self.chat else "max_tokens"] = output_len
        return msgspec.json.encode({**value, **self.common})

    def first(self, request: Request) -> Any:
        """The prompt of a request, or of the first turn of a conversation."""
        text = request.text
        if self.chat:
            return [{"role": "user", "content": text or ""}]
        return request.token_ids if self.as_ids or text is None else text

    def later(self, history: Any, answer: Outcome, turn: Turn) -> Any:
        """The prompt of the next turn: all that was said, with the answer that came."""
        if self.chat:
            return [*history, {"role": "assistant", "content": answer.generated_text}, {"role": "user", "content": turn.text or ""}]
        if isinstance(history, str):
            return history + answer.generated_text + (turn.text or "")
        return history + answer.token_ids + turn.token_ids
