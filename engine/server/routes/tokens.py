"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...text.tokenizer import LONG
from ..body import decode, decode_ids, read_body
from ..errors import ApiError
from ..openai.prepare import dumps
from ..openai.requests import DetokenizeRequest, TokenizeRequest
from ..state import ServerState


async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a conversation."""
    state: ServerState = request.app.state.server
    welcome, texts = state.ready()
    data = await read_body(request.headers, request.receive, state.config)
    asked = decode(TokenizeRequest, data)
    state.model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if asked.messages is not None:
        text = await texts.render(
            len(data), asked.messages, tools=asked.tools or [], template_args=asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt is not False,
        )  # fmt: skip
        special = bool(asked.add_special_tokens)
    else:
        text, special = asked.prompt or "", asked.add_special_tokens is not False
    ids = await texts.encode(text, add_special_tokens=special)

    def answer() -> bytes:
        spellings = _listed([texts.spelling(token)[0] for token in ids]) if asked.return_token_strs else b"null"
        head = dumps({"count": len(ids), "max_model_len": welcome.max_model_len})
        return b"".join((head[:-1], b',"tokens":', _listed(ids), b',"token_strs":', spellings, b"}"))

    body = answer() if len(ids) < LONG else await texts.in_thread(answer)
    return Response(body, media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    state: ServerState = request.app.state.server
    welcome, texts = state.ready()
    asked = await decode_ids(DetokenizeRequest, "tokens", await read_body(request.headers, request.receive, state.config))
    state.model(asked.model)
    if asked.tokens and max(asked.tokens) >= welcome.vocab_size:
        raise ApiError(400, f"tokens has {max(asked.tokens)}; the vocabulary has ids 0 to {welcome.vocab_size - 1}", param="tokens")
    text = await texts.decode_long(asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))
    return Response(dumps({"prompt": text}), media_type="application/json")


def _listed(values: Sequence[Any]) -> bytes:
    """A JSON array, made in pieces: other threads get their turn between them."""
    return b"[" + b",".join(dumps(values[start : start + LONG])[1:-1] for start in range(0, len(values), LONG)) + b"]"
