"""Text from token ids, one token at a time: pieces add up to the decoding of the whole, cut at the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..sampling_params import SamplingParams
from .tokenizer import Tokenizer

#: tokens that a character may be spread over: a UTF-8 character has at most four bytes
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one more token adds."""

    text: str = ""  # new text that will not change any more
    stop: str | None = None  # the stop string that ended the text


class _Stream(Protocol):
    """Token ids to text, without stop strings."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level vocabularies: the text is the tokens' bytes read as UTF-8. Exact, and constant cost a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Other vocabularies: decode a short window with and without the newest tokens and take the difference.

    The window holds the tokens emitted last (context for rules about spaces) and those not emitted yet. Text that ends
    in U+FFFD may be an unfinished character and waits for more tokens, as many as one can take.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is settled with this token."""
        self._pending.append(token_id)
        return self._emit(final=False)

    def flush(self) -> str:
        """The text of the tokens that still wait."""
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        """Decode context + pending, drop what the context alone gives."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        whole = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        if whole.endswith("\ufffd") and not final and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        if not whole.startswith(before):  # a stray byte makes the decoder read the bytes before it, already given as text, anew
            whole, before = self._tokenizer.decode(self._pending, skip_special_tokens=False), ""
        self._context, self._pending = self._pending, []
        return whole[len(before) :]


class Detokenizer:
    """Streams the text of one completion.

    Special tokens are left out unless ``params.skip_special_tokens`` is False. The end token and stop tokens, which end
    a completion, are left out unless ``params.include_stop_str_in_output``. Text that may be the beginning of a stop
    string waits until it is known. A stop string counts when it ends after the first ``params.min_tokens`` tokens; of
    several, the one that ends first is met, so the way text is cut into tokens makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, eos_ids: Sequence[int] | None = None) -> None:
        """``eos_ids`` are the model's end tokens; the tokenizer's own by default."""
        if eos_ids is None:
            eos_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self._end_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._tokenizer = tokenizer
        self._stream: _Stream = _ByteStream(tokenizer) if tokenizer.is_byte_level else _WindowStream(tokenizer)
        self._skip_special = params.skip_special_tokens
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._held = ""
        self._longest = [0] * len(self._stops)  # of each stop string: no longer beginning of it can end the text so far
        self._stop: str | None = None

    def push(self, token_id: int) -> Piece:
        """The text that ``token_id`` adds. After a stop string was met nothing is added any more."""
        if self._stop is not None:
            return Piece(stop=self._stop)
        self._tokens += 1
        if token_id in self._end_ids and not self._include_stop:
            return Piece()
        if self._skip_special and self._tokenizer.is_special(token_id):
            return Piece()
        return self._take(self._stream.push(token_id))

    def flush(self) -> Piece:
        """The text still held back, at the end of the completion."""
        if self._stop is not None:
            return Piece(stop=self._stop)
        piece = self._take(self._stream.flush())
        rest, self._held = self._held, ""
        return piece if piece.stop is not None else Piece(text=piece.text + rest)

    def _take(self, new: str) -> Piece:
        """Add text; give what is certain, look for a stop string."""
        if not self._stops:
            return Piece(text=new)
        text, old = self._held + new, len(self._held)
        if self._tokens > self._min_tokens:
            found = first_stop(text, self._stops, old)
            if found is not None:
                start, self._stop = found
                self._held = ""
                end = start + len(self._stop) if self._include_stop else start
                return Piece(text=text[:end], stop=self._stop)
        cut = len(text) - _held_length(text, len(new), self._stops, self._longest)
        self._held = text[cut:]
        return Piece(text=text[:cut])


def first_stop(text: str, stops: Sequence[str], old: int = 0) -> tuple[int, str] | None:
    """(start, stop string) of the match that ends first in ``text`` and after its first ``old`` characters; None if none.

    Of matches that end together the one that starts first is taken.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, old - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else (best[1], best[2])


def _held_length(text: str, n_new: int, stops: Sequence[str], longest: list[int]) -> int:
    """Length of the longest end of ``text``, whose last ``n_new`` characters are new, that is a beginning of a stop string, not all of it.

    ``longest`` has a bound for each stop string before these characters, and is brought up to date. A bound grows by a character at a time
    and every look lowers it: however long stop strings are, there are about as many looks as characters.
    """
    held = 0
    for place, stop in enumerate(stops):
        length = min(longest[place] + n_new, len(stop) - 1, len(text))
        while length > held and not text.endswith(stop[:length]):
            length -= 1
        longest[place] = length
        held = max(held, length)
    return held
