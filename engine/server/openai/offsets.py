"""Where each token begins in the text of an answer: ``text_offset`` of /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ..texts import Texts


class Offsets:
    """Offsets in characters, token by token. Tokens that share a character all begin where it does."""

    def __init__(self, texts: Texts, *, keep_special: bool, prompt: Sequence[int] = (), shown: str = "") -> None:
        """``keep_special``: the answer's text has its special tokens. With echo, ``prompt`` is shown as the text ``shown``."""
        self._texts, self._keep = texts, keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0
        self._left = len(prompt)  # tokens of the prompt that are still to come
        self._keep_in_prompt = False
        if prompt and texts.tokenizer is not None:
            whole = texts.decode(list(prompt), skip_special_tokens=False)
            self._keep_in_prompt = whole.endswith(shown) and shown != texts.decode(list(prompt))
            if self._keep_in_prompt:
                self._at = len(shown) - len(whole)  # what was put before the text, as a begin token, is not in it

    def next(self, token: int) -> int:
        """Where ``token``, the next one, begins."""
        start = max(0, self._at)
        keep = self._keep_in_prompt if self._left > 0 else self._keep
        if keep or not self._texts.is_special(token):
            text, data = self._texts.spelling(token)
            self._at += len(self._decoder.decode(data)) if self._texts.is_byte_level else len(text)
        self._left -= 1
        return start
