"""Sampling parameters of a request: its fields, the model's defaults, and the room that the prompt leaves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ...sampling_params import MAX_SEED, SamplingParams
from ..errors import ApiError, bad
from .fields import UNSUPPORTED, SharedFields

#: fields that mean the same in a request and in SamplingParams
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
#: more of them make every token slow
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 64, 1024, 1024
_KNOWN = {f.name for f in fields(SamplingParams)}


def refuse_unsupported(request: SharedFields) -> None:
    """Raise ApiError 400 for a field that asks for something not provided."""
    for name, neutral in UNSUPPORTED.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")


def sampling_of(request: SharedFields, defaults: dict[str, Any], **more: Any) -> SamplingParams:
    """Sampling parameters: the request's own over ``defaults``, with ``more`` that the route knows.

    Raises:
        ApiError: 400, a value out of range; names it.
    """
    refuse_unsupported(request)
    _check_sizes(request)
    values = dict(defaults)
    for name in _SAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if request.seed is not None:
        values["seed"] = request.seed & MAX_SEED
    if request.prompt_logprobs is not None and request.prompt_logprobs >= 0:
        values["prompt_logprobs"] = request.prompt_logprobs
    if request.logit_bias:
        if "logit_bias" not in _KNOWN:
            raise ApiError(400, "logit_bias is not supported; leave it out", param="logit_bias", code="unsupported_parameter")
        values["logit_bias"] = _bias(request.logit_bias)
    values.update(more)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise bad(error, str(error).split(" ")[0]) from None


def _check_sizes(request: SharedFields) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise ApiError(400, f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed", param="stop")
    ids = request.stop_token_ids or []
    if len(ids) > MAX_STOP_IDS:
        raise ApiError(400, f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_IDS} are allowed", param="stop_token_ids")


def _bias(given: dict[str, float]) -> dict[int, float]:
    """Token id -> what is added to its logit."""
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            text = f"logit_bias maps token ids to numbers, found the key {token[:40]!r}"
            raise ApiError(400, text, param="logit_bias")
    found = {int(token): value for token, value in given.items()}
    if len(found) < len(given):
        raise ApiError(400, "logit_bias names a token twice", param="logit_bias")
    return found


def room_for(prompt_tokens: int, asked: int | None, limit: int, default: int | None, param: str) -> int:
    """Most tokens to generate after a prompt, for a model that takes ``limit`` tokens in all.

    Raises:
        ApiError: 400, prompt and output do not fit; has the numbers.
    """
    room = limit - prompt_tokens
    if room < 1:
        raise ApiError(
            400, f"the prompt has {prompt_tokens} tokens; the model takes {limit}, of which at least one is generated",
            param="messages" if param == "max_completion_tokens" else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    if asked is None:
        return room if default is None else min(room, default)
    if asked > room:
        text = f"the prompt has {prompt_tokens} tokens and {param} asks for {asked} more; the model takes {limit} in all"
        raise ApiError(400, text, param=param, code="context_length_exceeded")
    return max(asked, 1)
