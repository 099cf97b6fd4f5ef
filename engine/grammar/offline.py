"""Grammars of the offline API, compiled in the caller's own process."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence

from ..text.tokenizer import Tokenizer
from .compiler import Compiler
from .structured import Form, StructuredOutputsParams

#: compiled grammars that are kept
_KEPT = 64


class Grammars:
    """Compiles when first asked, and keeps what it compiled last."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._of = (tokenizer, vocab_size, tuple(eos_ids))
        self._compiler: Compiler | None = None
        self._kept: OrderedDict[str, str] = OrderedDict()

    def compile(self, asked: StructuredOutputsParams) -> str:
        """The compiled grammar of ``asked``.

        Raises:
            ValueError: see ``Compiler``.
        """
        key = json.dumps(asked.to_wire())
        found = self._kept.get(key)
        if found is None:
            self._compiler = self._compiler or Compiler(*self._of)
            found = self._kept[key] = self._compiler.compile(Form(asked=asked))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found
