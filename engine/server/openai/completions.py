"""POST /v1/completions: the request becomes a ``CompletionJob``, which is answered whole or as a stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...sampling_params import SamplingParams
from ...serving.wire import Welcome
from ..body import decode_ids, read_body
from ..errors import ApiError
from ..sse import EventStream
from ..state import ServerState
from ..texts import Texts
from .completion_answer import stream_completion, whole_completion
from .generation import Generation, check_ids, mixed_prompts
from .logprobs import Spelling
from .offsets import NO_PROMPT, Offsets, Start, start_of
from .prepare import cut_prompt, grammar_of, request_name, submits, wanted_rank
from .requests import CompletionRequest
from .sampling import room_for, sampling_of

#: tokens generated when a request does not say (OpenAI's number)
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class CompletionJob:
    """A request to /v1/completions, checked."""

    request: CompletionRequest
    model: str  # name for the answer
    texts: Texts
    prompts: list[list[int]]
    shown: list[str]  # the prompts as text, for echo
    starts: list[Start]  # of their tokens, for echo with log-probabilities
    n: int  # completions of a prompt that are returned
    made: int  # that are made: best_of
    top: int | None  # log-probabilities asked for
    silent: bool  # max_tokens is 0: only the prompt is returned
    spelling: Spelling
    include_usage: bool
    usage_always: bool
    ids_too: bool

    def offsets(self, prompt: int) -> Offsets:
        """Places of the tokens in the text of a completion of the prompt number ``prompt``."""
        start = self.starts[prompt] if self.starts else NO_PROMPT
        return Offsets(self.texts, keep_special=self.request.skip_special_tokens is False, start=start)


async def completions(request: Request) -> Response:
    """The route."""
    state: ServerState = request.app.state.server
    welcome, texts = state.ready()
    data = await read_body(request.headers, request.receive, state.config)
    asked = await decode_ids(CompletionRequest, "prompt", data)
    model = state.model(asked.model)
    job = await _job(state, welcome, texts, asked, model)
    name = request_name("cmpl", asked, request.headers)
    grammar = await grammar_of(state, asked, len(data))
    params = _params(state, welcome, job)
    messages = await submits(
        name, job.prompts, params, welcome,
        priority=asked.priority or 0, grammar=grammar, dp_rank=wanted_rank(request.headers, welcome),
    )  # fmt: skip
    generation = Generation(state, name, messages, job.made)
    if asked.stream:
        return EventStream(generation, stream_completion(generation, job))
    return await whole_completion(generation, job, request.receive)


async def _job(state: ServerState, welcome: Welcome, texts: Texts, asked: CompletionRequest, model: str) -> CompletionJob:
    """Prompts as ids, and what the answer needs.

    Raises:
        ApiError: 400, fields that are wrong by themselves or together.
    """
    n = asked.n or 1
    made = max(n, asked.best_of or n)
    if asked.best_of is not None and asked.best_of < n:
        raise ApiError(400, f"best_of ({asked.best_of}) must be at least n ({n})", param="best_of")
    if asked.stream and made > n:
        raise ApiError(400, "best_of above n cannot be streamed: which ones are best is known at the end", param="best_of")
    if asked.stream and (asked.prompt_logprobs is not None and asked.prompt_logprobs >= 0):
        raise ApiError(400, "prompt_logprobs cannot be streamed; leave out stream, or use echo with logprobs", param="prompt_logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options is allowed only with stream", param="stream_options")
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(400, "max_tokens is 0: only with echo does that ask for anything", param="max_tokens")
    prompts = await _prompts(asked, texts, welcome, made, state.config.max_completions)
    shown = await _shown(asked, prompts, texts)
    starts: list[Start] = []
    for ids, text in zip(prompts, shown, strict=True) if asked.echo and asked.logprobs is not None else ():
        await asyncio.sleep(0)  # many prompts do not hold up the others' streams
        starts.append(await start_of(texts, ids, text))
    options = asked.stream_options
    as_ids = state.config.return_tokens_as_token_ids if asked.return_tokens_as_token_ids is None else asked.return_tokens_as_token_ids
    return CompletionJob(
        request=asked, model=model, texts=texts, prompts=prompts, shown=shown, starts=starts, n=n, made=made,
        top=asked.logprobs, silent=asked.max_tokens == 0, spelling=Spelling(texts, as_ids or texts.tokenizer is None),
        include_usage=bool(options and options.include_usage), usage_always=bool(options and options.continuous_usage_stats),
        ids_too=bool(asked.return_token_ids) or texts.tokenizer is None,
    )  # fmt: skip


async def _prompts(asked: CompletionRequest, texts: Texts, welcome: Welcome, made: int, most_made: int) -> list[list[int]]:
    """Token ids of every prompt, of which ``made`` completions each are wanted and ``most_made`` in all are allowed."""
    given = asked.prompt
    items: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not items:
        raise ApiError(400, "prompt is an empty list; give at least one prompt", param="prompt")
    if len(items) * made > most_made:  # told before anything is tokenised
        text = f"{len(items)} prompts times {made} completions is more than {most_made} (--max-completions)"
        raise ApiError(400, text, param="n")
    if any(isinstance(item, int) for item in items):
        raise mixed_prompts()
    limit = welcome.max_model_len - max(1, asked.max_tokens or 1)
    special = True if asked.add_special_tokens is None else asked.add_special_tokens
    most = None if asked.truncate_prompt_tokens else welcome.max_model_len
    found = []
    for item in items:
        await asyncio.sleep(0)  # many prompts do not hold up the others' streams
        if item == "":
            raise ApiError(400, "a prompt is empty; give at least one character", param="prompt")
        ids = await texts.encode(item, add_special_tokens=special, most=most) if isinstance(item, str) else item
        ids = cut_prompt(ids, asked.truncate_prompt_tokens, max(1, limit))
        room_for(len(ids), asked.max_tokens, welcome.max_model_len, DEFAULT_MAX_TOKENS, "max_tokens")
        check_ids(ids, welcome.vocab_size)
        found.append(ids)
    return found


async def _shown(asked: CompletionRequest, prompts: list[list[int]], texts: Texts) -> list[str]:
    """The prompts as text, for echo."""
    if not asked.echo:
        return []
    if isinstance(asked.prompt, str) and not asked.truncate_prompt_tokens:
        return [asked.prompt]
    if asked.prompt and all(isinstance(p, str) for p in asked.prompt) and not asked.truncate_prompt_tokens:
        return [str(p) for p in asked.prompt]
    if texts.tokenizer is None:
        return [""] * len(prompts)
    found = []
    for ids in prompts:
        await asyncio.sleep(0)  # many prompts do not hold up the others' streams
        found.append(await texts.decode_long(ids, skip_special_tokens=True))
    return found


def _params(state: ServerState, welcome: Welcome, job: CompletionJob) -> list[SamplingParams]:
    """How each prompt is sampled. Prompts differ in the room that they leave only: what is alike is made, and checked, once."""
    asked, found, made = job.request, [], dict[int, SamplingParams]()
    for ids in job.prompts:
        room = room_for(len(ids), asked.max_tokens, welcome.max_model_len, DEFAULT_MAX_TOKENS, "max_tokens")
        if room not in made:
            made[room] = _params_of(state, job, room)
        found.append(made[room])
    return found


def _params_of(state: ServerState, job: CompletionJob, max_tokens: int) -> SamplingParams:
    asked = job.request
    more: dict[str, Any] = {"max_tokens": max_tokens, "n": job.made}
    if job.top is not None or job.made > job.n:
        more["logprobs"] = job.top or 0
    if asked.echo and job.top is not None and asked.prompt_logprobs is None:
        more["prompt_logprobs"] = job.top
    return sampling_of(asked, state.defaults, **more)
