"""News from the front (rank 0) to the leaders, and the kinds of message a leader sends its replica. All msgpack, no pickle."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from .request import Request
from .sampling_params import SamplingParams

#: first byte of a message from a leader to its replica: a step, the end, an error, a question to all ranks, "still here"
PLAN, END, FAIL, CONTROL, KEEP = b"P", b"E", b"F", b"C", b"K"


class Refusal(ValueError):
    """The front refused a call; every rank raises it with the same text. Other errors are one rank's own."""


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """A request for the replica ``dp_rank``."""

    request_id: str
    index: int  # arrival number over the whole engine
    dp_rank: int
    prompt_ids: list[int]
    params: dict[str, Any]  # SamplingParams.to_wire()
    priority: int = 0
    grammar: str | None = None  # what output must match, a compiled grammar as JSON or the name of one that is kept

    def request(self) -> Request:
        """The request this asks for, arriving now."""
        return Request(
            request_id=self.request_id,
            index=self.index,
            prompt_ids=list(self.prompt_ids),
            params=SamplingParams.from_wire(self.params),
            priority=self.priority,
            grammar=self.grammar,
            arrival=time.monotonic(),
        )


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a request; unknown ids are ignored."""

    request_id: str


class KeepGrammar(msgspec.Struct, frozen=True, kw_only=True, tag="keep"):
    """Requests call this compiled grammar by its name from now on."""

    name: str
    text: str


class DropGrammar(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """No request calls this grammar by its name any more."""

    name: str


class TellPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag="tell"):
    """The replica ``dp_rank`` tells again all that its prefix cache holds: some news of it were lost."""

    dp_rank: int


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """The front refuses the call: every rank raises Refusal(message)."""

    message: str


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Every rank of the engine does ``name`` now, between two steps, and answers rank 0."""

    name: str
    args: dict[str, Any] = {}


Command = AddRequest | AbortRequest | KeepGrammar | DropGrammar | TellPrefixes | Fail | Ask

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_ask = msgspec.msgpack.Decoder(Ask)


def encode_commands(commands: list[Command]) -> bytes:
    """Commands as bytes."""
    return _encoder.encode(commands)


def decode_commands(data: bytes) -> list[Command]:
    """The inverse of ``encode_commands``.

    Raises:
        ValueError: bytes that are none.
    """
    return _commands.decode(data)


def encode_ask(ask: Ask) -> bytes:
    """The body of a CONTROL message to a replica."""
    return _encoder.encode(ask)


def decode_ask(data: bytes) -> Ask:
    """The inverse of ``encode_ask``.

    Raises:
        ValueError: bytes that are none.
    """
    return _ask.decode(data)
