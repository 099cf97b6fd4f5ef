"""What came of one request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Outcome:
    """One request. Times are perf_counter seconds; ``sent`` is when its bytes went to the socket.

    Token counts are the server's own (usage, or token ids): text is never tokenised again to count it.
    """

    planned: float = 0.0  # when it should have been sent
    started: float = 0.0  # when the client took it up
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # when each chunk with tokens came
    chunk_tokens: list[int] | None = None  # tokens of each of them; None where the server does not say
    ended: float = 0.0  # the last chunk of the completion, or the error
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the server had in its cache, where it says
    wanted: int = 0  # output tokens asked for
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def success(self) -> bool:
        """It ran to its end and is counted."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.sent if self.arrivals else 0.0

    @property
    def latency(self) -> float:
        """Seconds from sending to the last token."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None when there is no other."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks: not the time of a token where a chunk holds several."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def queue_time(self) -> float:
        """Seconds for which ``--max-concurrency`` held it back."""
        return max(0.0, self.sent - self.started)

    @property
    def generated_text(self) -> str:
        """All text."""
        return "".join(self.text)

    def spread(self) -> list[tuple[float, float]]:
        """(time, tokens) of each chunk; where the server does not say, its tokens are dealt evenly."""
        if self.chunk_tokens is not None:
            return [(at, float(n)) for at, n in zip(self.arrivals, self.chunk_tokens, strict=True)]
        return [(at, self.output_tokens / len(self.arrivals)) for at in self.arrivals]
