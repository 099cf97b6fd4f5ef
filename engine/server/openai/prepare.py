"""From a checked request to what is submitted to the engine: what both generating routes do alike."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...sampling_params import SamplingParams
from ...serving.wire import Submit, Welcome
from ..errors import ApiError, bad
from ..large import LARGE
from ..state import ServerState
from .fields import SharedFields
from .generation import pack_ids

#: characters of a request id that a client gives
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-")
RANK_HEADER, ID_HEADER = "x-data-parallel-rank", "x-request-id"


def request_name(kind: str, request: SharedFields, headers: Mapping[str, str]) -> str:
    """The public id of a request: ``kind``-, then the client's own id or a fresh one.

    Raises:
        ApiError: 400, the client's id is too long or has other characters.
    """
    given = request.request_id or headers.get(ID_HEADER)
    if not given:
        return f"{kind}-{uuid.uuid4().hex}"
    if len(given) > 128 or not _ID_CHARACTERS.issuperset(given):
        raise ApiError(400, "a request id has at most 128 letters, digits and '_.:-'", param="request_id")
    return f"{kind}-{given}"


def wanted_rank(headers: Mapping[str, str], welcome: Welcome) -> int | None:
    """The replica that a client asks for by its header, None for any.

    Raises:
        ApiError: 400, there is no such replica.
    """
    given = headers.get(RANK_HEADER)
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 9 or int(given) >= welcome.dp_size:
        raise ApiError(400, f"{RANK_HEADER} must be from 0 to {welcome.dp_size - 1}, found {given[:20]!r}", param=RANK_HEADER)
    return int(given)


async def grammar_of(state: ServerState, request: SharedFields, size: int, prompt: str | None = None) -> str | None:
    """The compiled grammar that the output must match, None for any output.

    The request has ``size`` bytes. ``prompt``: the rendered chat, None for none.

    Raises:
        ApiError: 400, it cannot be compiled; 503, the compiler has too much to do.
    """
    asked = {name: value for name in request.__struct_fields__ if name in _GRAMMAR_FIELDS and (value := getattr(request, name)) is not None}
    strict = any(isinstance(f := tool.get("function"), dict) and f.get("strict") for tool in asked.get("tools", ()))
    if (not asked.keys() - {"tools"} and not strict) or asked == {"response_format": {"type": "text"}}:
        return None
    if state.structured is None:
        if asked.get("tool_choice") in ("none", "auto") and asked.keys() <= {"tools", "tool_choice"}:
            return None
        raise ApiError(400, "structured output is not available on this server", param=next(iter(asked)), code="unsupported_parameter")
    try:
        grammar: str | None = await state.structured.compile_for(
            asked, names=None if prompt is None else state.parsers, prompt=prompt or "", large=size > LARGE
        )
    except ValueError as error:
        raise bad(error, next((name for name in asked if name != "tools"), None)) from None
    except RuntimeError as error:  # StructuredBusy
        raise ApiError(503, str(error), retry_after_s=2) from None
    return grammar


_GRAMMAR_FIELDS = frozenset(
    ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
     "tools", "tool_choice", "parallel_tool_calls")
)  # fmt: skip


async def submits(
    name: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], welcome: Welcome, *,
    priority: int, grammar: str | None, dp_rank: int | None,
) -> list[Submit]:  # fmt: skip
    """A message for each prompt. Those of several prompts are named ``name``-0, ``name``-1, ...

    Raises:
        ApiError: 400, a token id that the model does not have.
    """
    now = time.time()
    found = []
    written: dict[int, dict[str, Any]] = {}  # by identity: those of many prompts are one object
    for place, (ids, param) in enumerate(zip(prompts, params, strict=True)):
        if place:
            await asyncio.sleep(0)  # many prompts do not hold up the others' streams
        if id(param) not in written:
            try:
                param.check_vocabulary(welcome.vocab_size)
            except ValueError as error:
                raise bad(error, str(error).split(" ")[0]) from None
            written[id(param)] = param.to_wire()
        found.append(
            Submit(
                request_id=name if len(prompts) == 1 else f"{name}-{place}", prompt=pack_ids(ids, welcome.vocab_size),
                params=written[id(param)], priority=priority, grammar=grammar, dp_rank=dp_rank, at=now,
            )
        )  # fmt: skip
    return found


def cut_prompt(ids: list[int], keep: int | None, limit: int) -> list[int]:
    """The last ``keep`` tokens of a prompt; -1 keeps ``limit``."""
    if keep is None or keep == 0:
        return ids
    return ids[-(limit if keep == -1 else keep) :]


def dumps(value: Any) -> bytes:
    """JSON."""
    return msgspec.json.encode(value)
