"""News from the front (rank 0) to the leaders, and the kinds of message a leader sends its replica. All JSON, no pickle."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from .request import Request
from .sampling_params import SamplingParams

#: first byte of a message from a leader to its replica
PLAN, END, FAIL = b"P", b"E", b"F"


class Refusal(ValueError):
    """The front refused a call; every rank raises it with the same text. Other errors are one rank's own."""


@dataclass(frozen=True, kw_only=True)
class AddRequest:
    """A request for the replica ``dp_rank``."""

    op: ClassVar[str] = "add"
    request_id: str
    index: int  # arrival number over the whole engine
    dp_rank: int
    prompt_ids: list[int]
    params: dict[str, Any]  # SamplingParams.to_wire()
    priority: int = 0

    def request(self) -> Request:
        """The request this asks for, arriving now."""
        return Request(
            request_id=self.request_id,
            index=self.index,
            prompt_ids=list(self.prompt_ids),
            params=SamplingParams.from_wire(self.params),
            priority=self.priority,
            arrival=time.monotonic(),
        )


@dataclass(frozen=True, kw_only=True)
class AbortRequest:
    """End a request; unknown ids are ignored."""

    op: ClassVar[str] = "abort"
    request_id: str


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The front refuses the call: every rank raises Refusal(message)."""

    op: ClassVar[str] = "fail"
    message: str


Command = AddRequest | AbortRequest | Fail
_KINDS: dict[str, type[AddRequest] | type[AbortRequest] | type[Fail]] = {c.op: c for c in (AddRequest, AbortRequest, Fail)}


def encode_commands(commands: list[Command]) -> bytes:
    """Commands as JSON bytes."""
    return json.dumps([{"op": c.op, **asdict(c)} for c in commands], separators=(",", ":")).encode()


def decode_commands(data: bytes) -> list[Command]:
    """The inverse of ``encode_commands``."""
    return [_KINDS[row.pop("op")](**row) for row in json.loads(data)]
