"""Where each token begins in the text of an answer: ``text_offset`` of /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from ..texts import Texts


class Start(NamedTuple):
    """How the text of a completion begins with its prompt."""

    tokens: int = 0  # of the prompt that is shown
    keep: bool = False  # its special tokens are in the text
    at: int = 0  # where the first one begins; what was put before the text, as a begin token, is not in it


NO_PROMPT = Start()


async def start_of(texts: Texts, prompt: Sequence[int], shown: str) -> Start:
    """With echo, where ``prompt`` is shown as the text ``shown``. It takes long for a long prompt: once for all its completions."""
    if not prompt or texts.tokenizer is None:
        return Start(len(prompt))
    whole = await texts.decode_long(list(prompt), skip_special_tokens=False)
    if not whole.endswith(shown) or shown == await texts.decode_long(list(prompt), skip_special_tokens=True):
        return Start(len(prompt))
    return Start(len(prompt), True, len(shown) - len(whole))


class Offsets:
    """Offsets in characters, token by token. Tokens that share a character all begin where it does."""

    def __init__(self, texts: Texts, *, keep_special: bool, start: Start = NO_PROMPT) -> None:
        """``keep_special``: the answer's text has its special tokens. ``start``: the prompt comes first."""
        self._texts, self._keep = texts, keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._left, self._keep_in_prompt, self._at = start  # tokens of the prompt that are still to come

    def next(self, token: int) -> int:
        """Where ``token``, the next one, begins."""
        start = max(0, self._at)
        keep = self._keep_in_prompt if self._left > 0 else self._keep
        if keep or not self._texts.is_special(token):
            text, data = self._texts.spelling(token)
            self._at += len(self._decoder.decode(data)) if self._texts.is_byte_level else len(text)
        self._left -= 1
        return start
