"""Log-probabilities in OpenAI's two shapes, from rows [token id, logprob, rank] of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..texts import Texts
from .offsets import Offsets

#: what JSON can carry in the place of minus infinity (vLLM's number)
FLOOR = -9999.0
Row = Sequence[Sequence[float]]


class Spelling:
    """How tokens are written: as their text, or as ``token_id:N``."""

    def __init__(self, texts: Texts, as_ids: bool) -> None:
        self._texts, self._as_ids = texts, as_ids

    def text(self, token: int) -> str:
        """The token as text."""
        return f"token_id:{token}" if self._as_ids else self._texts.spelling(token)[0]

    def chat_entry(self, entry: Sequence[float]) -> dict[str, Any]:
        """Token, log-probability and bytes of one alternative."""
        token = int(entry[0])
        return {"token": self.text(token), "logprob": max(entry[1], FLOOR), "bytes": list(self._texts.spelling(token)[1])}


def chat_logprobs(rows: Sequence[Row], top: int, spelling: Spelling) -> list[dict[str, Any]]:
    """``choices[i].logprobs.content`` of the tokens of ``rows``, with at most ``top`` alternatives each."""
    found = []
    for row in rows:
        entry = spelling.chat_entry(row[0])
        best = sorted((r for r in row if r[2] <= top), key=lambda r: r[2])
        entry["top_logprobs"] = [spelling.chat_entry(r) for r in best]
        found.append(entry)
    return found


class TextLogprobs:
    """``choices[i].logprobs`` of /v1/completions, filled row by row; offsets go on over the pieces of a stream."""

    def __init__(self, top: int, spelling: Spelling, offsets: Offsets) -> None:
        self._top, self._spelling, self._offsets = top, spelling, offsets

    def make(self, rows: Sequence[Row | None], tokens: Sequence[int] | None = None) -> dict[str, Any]:
        """The object for more tokens. ``tokens`` are needed where a row is None: the first token of a prompt has none."""
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for place, row in enumerate(rows):
            if row is None:
                assert tokens is not None
                token = tokens[place]
                values.append(None)
                tops.append(None)
            else:
                token = int(row[0][0])
                values.append(max(row[0][1], FLOOR))
                tops.append(self._alternatives(row))
            texts.append(self._spelling.text(token))
            offsets.append(self._offsets.next(token))
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _alternatives(self, row: Row) -> dict[str, float]:
        """The likeliest tokens, best first, and the token itself. Of tokens with one text only one can have it: the token itself, else the
        likeliest; the others are written as ``token_id:N``.
        """
        best = sorted((r for r in row[1:] if r[2] <= self._top), key=lambda r: r[2])
        chosen = [row[0], *best] if row[0][2] > self._top else sorted([row[0], *best], key=lambda r: r[2])
        own, own_text = int(row[0][0]), self._spelling.text(int(row[0][0]))
        found: dict[str, float] = {}
        for entry in chosen:
            token = int(entry[0])
            text = own_text if token == own else self._spelling.text(token)
            if token != own and (text == own_text or text in found):
                text = f"token_id:{token}"
            found[text] = max(entry[1], FLOOR)
        return found


def prompt_logprobs(rows: Sequence[Row | None] | None, texts: Texts) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: per position token id -> log-probability, rank and text; the first position has none."""
    if rows is None:
        return None
    found: list[dict[str, Any] | None] = []
    for row in rows:
        if row is None:
            found.append(None)
            continue
        found.append(
            {str(int(e[0])): {"logprob": max(e[1], FLOOR), "rank": int(e[2]), "decoded_token": texts.spelling(int(e[0]))[0]} for e in row}
        )
    return found
