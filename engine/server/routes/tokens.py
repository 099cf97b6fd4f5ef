"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..body import decode, read_body
from ..errors import ApiError
from ..openai.prepare import dumps
from ..openai.requests import DetokenizeRequest, TokenizeRequest
from ..state import ServerState


async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a conversation."""
    state: ServerState = request.app.state.server
    welcome, texts = state.ready()
    asked = decode(TokenizeRequest, await read_body(request.headers, request.receive, state.config))
    state.model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if asked.messages is not None:
        text = texts.render(
            asked.messages, tools=asked.tools or [], template_args=asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt is not False,
        )  # fmt: skip
        special = bool(asked.add_special_tokens)
    else:
        text, special = asked.prompt or "", asked.add_special_tokens is not False
    ids = await texts.encode(text, add_special_tokens=special)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": welcome.max_model_len, "tokens": ids, "token_strs": None}
    if asked.return_token_strs:
        found["token_strs"] = [texts.spelling(token)[0] for token in ids]
    return Response(dumps(found), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    state: ServerState = request.app.state.server
    welcome, texts = state.ready()
    asked = decode(DetokenizeRequest, await read_body(request.headers, request.receive, state.config))
    state.model(asked.model)
    wrong = next((token for token in asked.tokens if token >= welcome.vocab_size), None)
    if wrong is not None:
        raise ApiError(400, f"tokens has {wrong}; the vocabulary has ids 0 to {welcome.vocab_size - 1}", param="tokens")
    text = await texts.decode_long(asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))
    return Response(dumps({"prompt": text}), media_type="application/json")
