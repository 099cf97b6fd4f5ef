"""What a request gives back. Shapes and names follow vLLM; every class travels between ranks as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position, from the raw logits (before penalties and temperature)."""

    logprob: float  # natural logarithm of the probability
    rank: int  # 1 for the likeliest token of the vocabulary
    decoded_token: str | None = None  # the token as text; None without a tokenizer


#: per position: token id -> Logprob; the token of the position itself comes first
TokenLogprobs = dict[int, Logprob]


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int  # which of the ``n`` completions
    text: str = ""  # the text so far; empty without a tokenizer
    token_ids: list[int] = field(default_factory=list)  # generated ids so far, the end token included
    logprobs: list[TokenLogprobs] | None = None  # one entry a generated token, when asked for
    cumulative_logprob: float | None = None  # sum of the generated tokens' log-probabilities, when logprobs were asked for
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while running
    stop_reason: int | str | None = None  # the stop token id or stop string that was met; None for the model's end token

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values for JSON."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "logprobs": _pack(self.logprobs),
            "cumulative_logprob": self.cumulative_logprob,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CompletionOutput:
        """The inverse of ``to_dict``."""
        return cls(**{**values, "logprobs": _unpack(values.get("logprobs"))})


@dataclass(kw_only=True)
class RequestMetrics:
    """Times (seconds of ``time.monotonic``) and counts of one request."""

    arrival: float = 0.0  # when the request was accepted
    first_token_time: float | None = None  # when the host saw the first generated token
    finish_time: float | None = None  # when the request ended
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    preemptions: int = 0  # times the request lost its pages and was recomputed

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end; None before it."""
        return None if self.finish_time is None else self.finish_time - self.arrival


@dataclass(kw_only=True)
class RequestOutput:
    """The state of one request: its prompt and its ``n`` completions, finished or not."""

    request_id: str  # as given or made by the engine
    prompt: str | None = None  # the prompt's text; None when it came as token ids
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)  # ordered by index
    finished: bool = False  # every completion has ended
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one entry a prompt token, the first None; None when not asked for
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts: prompt, completion (over all completions), total, and prompt tokens from the prefix cache."""
        prompt, completion = len(self.prompt_token_ids), sum(len(o.token_ids) for o in self.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": self.metrics.cached_tokens,
        }

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values for JSON."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [o.to_dict() for o in self.outputs],
            "finished": self.finished,
            "prompt_logprobs": _pack(self.prompt_logprobs),
            "metrics": asdict(self.metrics),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RequestOutput:
        """The inverse of ``to_dict``."""
        parts = {
            "outputs": [CompletionOutput.from_dict(o) for o in values["outputs"]],
            "prompt_logprobs": _unpack(values.get("prompt_logprobs")),
            "metrics": RequestMetrics(**values["metrics"]),
        }
        return cls(**{**values, **parts})


def _pack(positions: Any) -> list[list[list[Any]] | None] | None:
    """Per position a list of [id, logprob, rank, text]: JSON has no integer keys, and order is kept."""
    if positions is None:
        return None
    return [None if p is None else [[i, e.logprob, e.rank, e.decoded_token] for i, e in p.items()] for p in positions]


def _unpack(rows: list[list[list[Any]] | None] | None) -> Any:
    """The inverse of ``_pack``."""
    if rows is None:
        return None
    return [None if row is None else {i: Logprob(logprob=lp, rank=rank, decoded_token=text) for i, lp, rank, text in row} for row in rows]
