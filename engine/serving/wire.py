"""What HTTP processes and the engine's rank 0 say to each other: msgpack over a ZeroMQ socket of this machine.

Rank 0 binds a ROUTER socket, every HTTP process connects a DEALER to it. A frame is one message (``encode``).
Up: ``Hello``, then ``Submit``, ``Grammar``, ``Abort``, ``Control``, and ``Alive`` all the time.
Down: ``Welcome``, ``News``, ``Refused``, ``Reply``, ``Snapshot``, ``Goodbye``.
Every request that was submitted ends with ``Refused`` or with a ``Piece`` for each of its ``n`` completions that has a ``finish_reason``.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: raised whenever a message changes its meaning; both sides compare it at the start
PROTOCOL = 2
#: seconds between two signs of life of an HTTP process
ALIVE_EVERY_S = 2.0


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A message; the class name travels with it."""


# ---- up: HTTP process -> rank 0


class Hello(_Message, frozen=True, kw_only=True):
    """The first message of an HTTP process."""

    protocol: int = 0
    version: str  # rorqual.__version__
    name: str = ""  # which of the HTTP processes; one that says hello under the name of another has replaced it, whose requests end


class Submit(_Message, frozen=True, kw_only=True):
    """Complete a prompt."""

    request_id: str  # unique over all HTTP processes; completions are named by (request_id, index)
    prompt: bytes  # token ids, little-endian int32 one after the other
    params: dict[str, Any]  # SamplingParams.to_wire(); ``n`` completions
    priority: int = 0  # lower runs first
    grammar: str | None = None  # what output must match: the name of a ``Grammar``, or its text; None: anything
    dp_rank: int | None = None  # replica that shall run it; None: as routing chooses
    at: float = 0.0  # time.time() at which the HTTP process had the whole request


class Grammar(_Message, frozen=True, kw_only=True):
    """A compiled grammar, before the first request that has it. Both sides forget the oldest as ``grammar.names.Shelf`` does."""

    name: str
    text: str  # JSON of xgrammar


class Abort(_Message, frozen=True, kw_only=True):
    """End requests now; unknown ids are ignored. Each open completion still gets its last ``Piece``, with reason "abort"."""

    request_ids: list[str] = []  # empty: none
    everything: bool = False  # of this HTTP process and all others


class Control(_Message, frozen=True, kw_only=True):
    """Ask for something that is no completion; answered by ``Reply``.

    ``flush_cache``: forget cached prefixes of all replicas -> {"pages": n}, refused while requests run.
    ``expert_load``: counts of all ranks -> {"layers": [...], "counts": [[...]], ...}. ``stats``: counters of every rank.
    ``start_profile`` / ``stop_profile``: torch's profiler on every rank -> {"folder": path}.
    ``ping``: goes through a step of all ranks -> {}.
    """

    control_id: str
    name: str
    args: dict[str, Any] = {}


class Alive(_Message, frozen=True, kw_only=True):
    """A sign of life of the HTTP process' event loop, every ``ALIVE_EVERY_S`` seconds. One that gives none for long is replaced."""


# ---- down: rank 0 -> HTTP process


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer to ``Hello``: what an HTTP process has to know of the engine."""

    protocol: int
    version: str
    model: str  # as given on the command line
    folder: str  # of tokenizer.json and the chat template; "": no tokenizer, ids in and ids out
    model_type: str
    max_model_len: int  # tokens of prompt and output
    vocab_size: int
    eos_token_ids: list[int]
    dp_size: int
    layout: str  # such as "pp1 dp4 tp2", for people
    device: str  # such as "NVIDIA H200", or "cpu"
    page_size: int
    pool_tokens: int  # that the KV pool of one replica holds
    started: float  # time.time() at which the engine was ready


class Piece(_Message, frozen=True, kw_only=True, gc=False):
    """News of one completion."""

    request_id: str
    index: int = 0  # which of the ``n`` completions
    text: str = ""  # new text
    token_ids: list[int] = []  # new tokens
    logprobs: list[list[list[float]]] | None = None  # a row per new token: [id, logprob, rank], of itself and then its alternatives
    prompt_logprobs: list[list[list[float]] | None] | None = None  # with the first token; the first position has none
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; the last piece of the completion has one
    stop_reason: int | str | None = None  # stop token or string that ended it
    error: str | None = None  # with reason "error" and, where there is one, "abort": what happened
    cached_tokens: int = 0  # in the last piece: prompt tokens that came from a prefix cache
    dp_rank: int = 0  # in the first piece: where it runs


class News(_Message, frozen=True, kw_only=True):
    """What a step of the engine brought."""

    pieces: list[Piece]


class Refused(_Message, frozen=True, kw_only=True):
    """A request that was not taken. Nothing of it has run."""

    request_id: str
    status: int  # HTTP status: 400 wrong, 429 too many requests, 503 the engine is ending
    error: str
    retry_after_s: float | None = None  # with 429


class Reply(_Message, frozen=True, kw_only=True):
    """Answer to ``Control``."""

    control_id: str
    ok: bool
    body: dict[str, Any] = {}
    error: str | None = None


class Snapshot(_Message, frozen=True, kw_only=True):
    """Counters, once a second while anything happens and every few seconds otherwise. See ``serving.snapshot`` for the fields."""

    at: float  # time.time()
    replicas: list[dict[str, Any]]  # one of each DP rank
    engine: dict[str, Any]  # of all together: histograms, expert balance, routing


class Goodbye(_Message, frozen=True, kw_only=True):
    """The engine takes no more requests: open ones are drained ("drain"), or all is over ("end")."""

    phase: str
    reason: str


Up = Hello | Submit | Grammar | Abort | Control | Alive
Down = Welcome | News | Refused | Reply | Snapshot | Goodbye

_encoder = msgspec.msgpack.Encoder()
_up = msgspec.msgpack.Decoder(Up)
_down = msgspec.msgpack.Decoder(Down)


def encode(message: Up | Down) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_up(data: bytes) -> Up:
    """A message for the engine.

    Raises:
        ValueError: bytes that are none (``msgspec.ValidationError`` and ``DecodeError`` are ValueErrors).
    """
    message: Up = _up.decode(data)
    return message


def decode_down(data: bytes) -> Down:
    """A message for an HTTP process.

    Raises:
        ValueError: bytes that are none.
    """
    message: Down = _down.decode(data)
    return message
