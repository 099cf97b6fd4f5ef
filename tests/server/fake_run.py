"""One completion of the fake engine."""

import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.serving import wire
from rorqual.engine.text.detokenizer import Detokenizer


def pseudo_token(prompt: list[int], seed: int, index: int, position: int, vocab: int) -> int:
    """The token at ``position`` of completion ``index``; never one of the first 8 ids, which are special in the tiny model."""
    state = zlib.crc32(np.asarray([seed & 0x7FFFFFFF, index, position, *prompt], dtype="<i4").tobytes())
    return 8 + state % (vocab - 8)


@dataclass(kw_only=True)
class Running:
    """One completion in flight."""

    client: bytes
    submit: wire.Submit
    index: int
    params: SamplingParams
    prompt: list[int]
    tokens: list[int] | None  # of a script
    text: Detokenizer | None
    due: float
    made: int = 0
    dp_rank: int = 0

    def step(self, engine: Any) -> wire.Piece:
        """The next ``engine.chunk`` tokens."""
        ids: list[int] = []
        rows: list[list[list[float]]] = []
        text, reason, stop = "", None, None
        first = self.made == 0
        while len(ids) < engine.chunk and reason is None:
            if engine.fail_after is not None and self.made >= engine.fail_after:
                reason = "error"
                break
            token = self._token(engine.vocab)
            ids.append(token)
            rows.append(_row(token, self.made, self.params.logprobs or 0, engine.vocab))
            more, reason, stop = self._push(token, engine.eos)
            text += more
        if reason is not None and self.text is not None and not isinstance(stop, str):
            text += self.text.flush().text
        self.due = time.monotonic() + engine.delay
        return wire.Piece(
            request_id=self.submit.request_id, index=self.index, text=text, token_ids=ids,
            logprobs=rows if self.params.logprobs is not None else None, prompt_logprobs=self._scored(engine.vocab) if first else None,
            finish_reason=reason, stop_reason=stop, error="the fake engine was told to fail" if reason == "error" else None,
            cached_tokens=engine.cached_tokens if reason is not None else 0, dp_rank=self.dp_rank if first else 0,
        )  # fmt: skip

    def _push(self, token: int, eos: tuple[int, ...]) -> tuple[str, str | None, int | str | None]:
        """One more token: (its text, why the completion has ended, what stopped it)."""
        self.made += 1
        piece = None if self.text is None else self.text.push(token)
        text = piece.text if piece is not None else ""
        if piece is not None and piece.stop is not None:
            return text, "stop", piece.stop
        if token in self.params.stop_ids and self.made > self.params.min_tokens:
            return text, "stop", token
        if token in eos and not self.params.ignore_eos:
            return text, "stop", None
        if self.made >= self.params.max_tokens or (self.tokens is not None and self.made >= len(self.tokens)):
            return text, "length", None
        return text, None, None

    def _token(self, vocab: int) -> int:
        if self.tokens is not None:
            return self.tokens[self.made]
        return pseudo_token(self.prompt, self.params.seed or 0, self.index, self.made, vocab)

    def _scored(self, vocab: int) -> list[list[list[float]] | None] | None:
        """The prompt's log-probabilities, when asked for."""
        top = self.params.prompt_logprobs
        return None if top is None else [None, *[_row(t, i, top, vocab) for i, t in enumerate(self.prompt[1:], 1)]]


def _row(token: int, position: int, top: int, vocab: int) -> list[list[float]]:
    """The logprobs at a position: the token itself is the likeliest, those after it by id follow."""
    best = -0.25 - (position % 4) / 4
    others = [[float((token + k) % vocab), best - k, float(k + 1)] for k in range(1, top)]
    return [[float(token), best, 1.0], *others]
