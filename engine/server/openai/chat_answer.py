"""Answers of /v1/chat/completions: whole, or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ...serving.wire import Piece
from ..parsers import Delta
from .generation import Generation, Watch, check
from .logprobs import chat_logprobs, prompt_logprobs
from .prepare import dumps
from .stream import Tail, prefix_of, stream_events
from .usage import Usage

if TYPE_CHECKING:
    from .chat import ChatJob


class _Choice:
    """The message of one completion while its pieces come."""

    def __init__(self, job: ChatJob) -> None:
        self._job, self._parser = job, job.parser()
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.rows: list[list[list[float]]] = []
        self.reasoned = 0  # tokens of reasoning
        self.prompt_rows: Any = None
        self.reason: str | None = None
        self.stop: int | str | None = None

    def add(self, piece: Piece) -> None:
        """Fold a piece in; ApiError for one that tells a failure."""
        check(piece)
        if self._parser.in_reasoning:
            self.reasoned += len(piece.token_ids)
        self._fold(self._parser.push(piece.text))
        self.ids += piece.token_ids
        self.rows += piece.logprobs or ()
        self.prompt_rows = piece.prompt_logprobs or self.prompt_rows
        if piece.finish_reason is not None:
            self._fold(self._parser.finish())
            self.reason, self.stop = end_reason(piece.finish_reason, self._parser.calls), piece.stop_reason

    def _fold(self, delta: Delta) -> None:
        self.reasoning.append(delta.reasoning)
        self.content.append(delta.content)
        for part in delta.tool_calls:
            while len(self.calls) <= part.index:
                self.calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
            call = self.calls[part.index]
            call["id"] = part.id or call["id"]
            call["function"]["name"] = part.name or call["function"]["name"]
            call["function"]["arguments"] += part.arguments

    def as_dict(self, index: int) -> dict[str, Any]:
        """The entry of ``choices``."""
        job = self._job
        content = job.echoed + "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else ""), "refusal": None}
        reasoning = "".join(self.reasoning)
        if reasoning and job.reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        logprobs = None if job.top is None else {"content": chat_logprobs(self.rows, job.top, job.spelling), "refusal": None}
        found = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.reason, "stop_reason": self.stop}
        if job.ids_too:
            found["token_ids"] = self.ids
        return found


def end_reason(reason: str, calls: int) -> str:
    """OpenAI's finish reason: a message that ends well and has tool calls ends for them."""
    return "tool_calls" if calls and reason == "stop" else reason


async def whole_chat(generation: Generation, job: ChatJob, receive: Any) -> Response:
    """Wait for all completions and answer with them."""
    usage = Usage(len(job.prompt))
    choices = [_Choice(job) for _ in range(job.n)]
    with generation:
        async with Watch(receive, generation):
            while not generation.taken:
                for place, piece in await generation.take():
                    choices[place].add(piece)
                    usage.completion += len(piece.token_ids)
                    usage.cached = max(usage.cached, piece.cached_tokens)
    usage.reasoning = sum(choice.reasoned for choice in choices)
    answer: dict[str, Any] = {
        "id": generation.name, "object": "chat.completion", "created": generation.created, "model": job.model,
        "choices": [choice.as_dict(i) for i, choice in enumerate(choices)], "usage": usage.as_dict(),
    }  # fmt: skip
    if job.request.prompt_logprobs is not None:
        rows = next((c.prompt_rows for c in choices if c.prompt_rows is not None), None)
        answer["prompt_logprobs"] = prompt_logprobs(rows, job.texts)
    if job.ids_too:
        answer["prompt_token_ids"] = job.prompt
    return Response(dumps(answer), media_type="application/json")


def stream_chat(generation: Generation, job: ChatJob) -> AsyncIterator[bytes]:
    """The events of a stream: the role first, then an event for each piece; those that came together in one write."""
    usage = Usage(len(job.prompt))
    head = {"id": generation.name, "object": "chat.completion.chunk", "created": generation.created, "model": job.model}
    prefix = prefix_of(head)
    writers = [_ChoiceWriter(job, place, prefix, usage).events for place in range(job.n)]
    return stream_events(generation, head, usage, writers, include_usage=job.include_usage)


class _ChoiceWriter:
    """Writes the events of one completion."""

    def __init__(self, job: ChatJob, place: int, prefix: bytes, usage: Usage) -> None:
        self._job, self._place, self._usage = job, place, usage
        self._prefix = prefix + str(place).encode() + b',"delta":'
        self._parser = job.parser()
        self._first = True
        self._tail = Tail(usage, listed=job.include_usage, always=job.usage_always)

    def events(self, piece: Piece) -> bytes:
        """One piece as an event, after the one with the role if it is the first; ApiError for one that tells a failure."""
        check(piece)
        job, usage, role = self._job, self._usage, b""
        usage.cached = max(usage.cached, piece.cached_tokens)
        if self._first:
            role = self._role()
        usage.completion += len(piece.token_ids)
        if self._parser.in_reasoning:
            usage.reasoning += len(piece.token_ids)
        delta = self._parser.push(piece.text)
        reason = b"null"
        if piece.finish_reason is not None:
            delta = _joined(delta, self._parser.finish())
            reason = dumps(end_reason(piece.finish_reason, self._parser.calls))
        elif not delta and job.top is None and not job.ids_too:
            return role  # nothing of it can be shown yet
        logprobs, more = b"null", b""
        if job.top is not None:
            logprobs = b'{"content":' + dumps(chat_logprobs(piece.logprobs or (), job.top, job.spelling)) + b"}"
        if job.ids_too:
            more = b',"token_ids":' + dumps(piece.token_ids)
        if piece.stop_reason is not None:
            more += b',"stop_reason":' + dumps(piece.stop_reason)
        parts = (role, self._prefix, self._delta(delta), b',"logprobs":', logprobs, b',"finish_reason":', reason, more, self._tail.now())
        return b"".join(parts)

    def _role(self) -> bytes:
        self._first = False
        delta = b'{"role":"assistant","content":' + dumps(self._job.echoed) + b"}"
        more = b',"prompt_token_ids":' + dumps(self._job.prompt) if self._job.ids_too else b""
        return self._prefix + delta + b',"logprobs":null,"finish_reason":null' + more + self._tail.now()

    def _delta(self, delta: Delta) -> bytes:
        """The new parts of the message as JSON."""
        if delta.content and not delta.reasoning and not delta.tool_calls:
            return b'{"content":' + dumps(delta.content) + b"}"
        found: dict[str, Any] = {}
        if delta.content:
            found["content"] = delta.content
        if delta.reasoning and self._job.reasoning:
            found["reasoning_content"] = found["reasoning"] = delta.reasoning
        if delta.tool_calls:
            found["tool_calls"] = [_call_part(part) for part in delta.tool_calls]
        return dumps(found)


def _call_part(part: Any) -> dict[str, Any]:
    """A part of a tool call as OpenAI streams it."""
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, "id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


def _joined(first: Delta, second: Delta) -> Delta:
    if not second:
        return first
    return Delta(
        reasoning=first.reasoning + second.reasoning,
        content=first.content + second.content,
        tool_calls=first.tool_calls + second.tool_calls,
    )
