"""POST /v1/chat/completions: the request becomes a ``ChatJob``, which is answered whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..body import decode, read_body
from ..errors import ApiError, bad
from ..parsers import ChatParser, parser_factory
from ..sse import EventStream
from ..state import ServerState
from ..texts import Texts
from .chat_answer import stream_chat, whole_chat
from .generation import Generation
from .logprobs import Spelling
from .prepare import cut_prompt, grammar_of, request_name, submits, wanted_rank
from .requests import ChatRequest
from .sampling import room_for, sampling_of


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """A request to /v1/chat/completions, checked."""

    request: ChatRequest
    model: str  # name for the answer
    texts: Texts
    prompt: list[int]
    n: int
    top: int | None  # alternatives of each token; None for no log-probabilities
    parser: Callable[[], ChatParser]  # a new one for each completion
    reasoning: bool  # the answer may tell what the model thought
    spelling: Spelling
    include_usage: bool
    usage_always: bool
    ids_too: bool
    echoed: str  # the last message, with echo


async def chat_completions(request: Request) -> Response:
    """The route."""
    state: ServerState = request.app.state.server
    welcome, texts = state.ready()
    data = await read_body(request.headers, request.receive, state.config)
    asked = decode(ChatRequest, data)
    model = state.model(asked.model)
    _check(asked)
    name = request_name("chatcmpl", asked, request.headers)
    text = await _prompt_text(texts, asked, len(data))
    ids = await texts.encode(text, add_special_tokens=bool(asked.add_special_tokens), most=welcome.max_model_len)
    ids = cut_prompt(ids, asked.truncate_prompt_tokens, welcome.max_model_len - 1)
    job = _job(state, texts, asked, model, ids, text)
    grammar = await grammar_of(state, asked, len(data), "</think>" if asked.continue_final_message else text)
    wanted = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    more: dict[str, Any] = {"max_tokens": room_for(len(ids), wanted, welcome.max_model_len, None, "max_completion_tokens"), "n": job.n}
    if job.top is not None:
        more["logprobs"] = job.top
    if job.parser().needs_special_tokens:
        more["skip_special_tokens"] = False
    messages = await submits(
        name, [ids], [sampling_of(asked, state.defaults, **more)], welcome,
        priority=asked.priority or 0, grammar=grammar, dp_rank=wanted_rank(request.headers, welcome),
    )  # fmt: skip
    generation = Generation(state, name, messages, job.n)
    if asked.stream:
        return EventStream(generation, stream_chat(generation, job))
    return await whole_chat(generation, job, request.receive)


def _check(asked: ChatRequest) -> None:
    """Raise ApiError 400 for fields that do not go together."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options is allowed only with stream", param="stream_options")
    if asked.stream and asked.prompt_logprobs is not None and asked.prompt_logprobs >= 0:
        raise ApiError(400, "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")
    if asked.chat_template is not None:
        text = "chat_template cannot be set by a request: a template is a program; the server's is set with --chat-template"
        raise ApiError(400, text, param="chat_template", code="unsupported_parameter")
    if asked.continue_final_message and asked.add_generation_prompt:
        raise ApiError(400, "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message")
    if asked.tool_choice not in (None, "none") and not asked.tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")


async def _prompt_text(texts: Texts, asked: ChatRequest, size: int) -> str:
    """The conversation as the model reads it. The request has ``size`` bytes."""
    args = dict(asked.chat_template_kwargs or {})
    switched = "thinking" in args or "enable_thinking" in args
    if asked.thinking is not None and not switched:
        kind = asked.thinking.get("type")
        if kind not in ("enabled", "disabled"):
            raise ApiError(400, f"thinking.type must be enabled or disabled, found {str(kind)[:40]!r}", param="thinking")
        args["thinking"], switched = kind == "enabled", True
    if asked.reasoning_effort is not None:
        args.setdefault("reasoning_effort", asked.reasoning_effort)  # for templates that read it
        if not switched:
            args["thinking"] = asked.reasoning_effort != "none"
    tools = [] if asked.tool_choice == "none" else asked.tools or []
    return await texts.render(
        size, asked.messages, tools=tools, template_args=args, add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
    )  # fmt: skip


def _job(state: ServerState, texts: Texts, asked: ChatRequest, model: str, ids: list[int], prompt: str) -> ChatJob:
    """What the answer needs."""
    config, options = state.config, asked.stream_options
    n = asked.n or 1
    if n > config.max_completions:
        raise ApiError(400, f"n is {n}; at most {config.max_completions} completions are made (--max-completions)", param="n")
    as_ids = config.return_tokens_as_token_ids if asked.return_tokens_as_token_ids is None else asked.return_tokens_as_token_ids
    tools = asked.tools or []
    opening = "</think>" if asked.continue_final_message else prompt  # an answer that goes on has no reasoning before it
    choice = asked.tool_choice if asked.tool_choice is not None else "auto"
    if choice == "auto" and not config.enable_auto_tool_choice:
        choice = "none"

    try:
        parser = parser_factory(
            state.parsers, prompt=opening, tools=tools, tool_choice=choice, parallel_tool_calls=asked.parallel_tool_calls is not False
        )
    except ValueError as error:
        raise bad(error, "tools") from None
    last = asked.messages[-1].get("content")
    return ChatJob(
        request=asked, model=model, texts=texts, prompt=ids, n=n, top=(asked.top_logprobs or 0) if asked.logprobs else None,
        parser=parser, reasoning=asked.include_reasoning is not False, spelling=Spelling(texts, as_ids),
        include_usage=bool(options and options.include_usage), usage_always=bool(options and options.continuous_usage_stats),
        ids_too=bool(asked.return_token_ids), echoed=last if asked.echo and isinstance(last, str) else "",
    )  # fmt: skip
