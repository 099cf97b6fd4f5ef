"""What the choice of a server needs to know of a request. Whether it is a right one is for that server to say."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

#: tokens that are expected of a request that does not say
_USUAL_OUTPUT = 512


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt as bytes, of which four are taken for a token, and how much may come back."""

    prompt: bytes = b""
    max_tokens: int = _USUAL_OUTPUT
    stream: bool = False


_NOTHING = msgspec.Raw()


class _Body(msgspec.Struct):
    prompt: Any = None
    messages: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_Body)


def read_request(body: bytes) -> Asked:
    """What is asked for; nothing in particular when it cannot be told.

    Tools come before messages, as in the prompt that is made of them, so that conversations keep their leading bytes
    from turn to turn.
    """
    try:
        found = _decoder.decode(body)
    except (ValueError, RecursionError):
        return Asked()
    chat = bytes(found.messages) not in (b"", b"null")
    prompt = bytes(found.tools) + bytes(found.messages) if chat else _prompt_bytes(found.prompt)
    output = found.max_completion_tokens or found.max_tokens or _USUAL_OUTPUT
    several = max(1, min(found.n or 1, 1024))
    return Asked(prompt=prompt, max_tokens=max(1, min(output, 1 << 24)) * several, stream=bool(found.stream))


def _prompt_bytes(prompt: Any) -> bytes:
    """Text as UTF-8, ids as int32, several prompts one after the other."""
    several = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return b"".join(_one_prompt(each) for each in several)


def _one_prompt(prompt: Any) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")
    try:
        return array("i", prompt).tobytes()
    except (TypeError, OverflowError):
        return b""
