"""xgrammar, imported when the first grammar comes: it takes seconds, and most engines never see one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..text.tokenizer import Tokenizer

#: what its errors begin with: the time, and the place in its source
_ORIGIN = re.compile(r"^\s*(\[[0-9:]+\]\s*)?(\S+\.(cc|h|cpp):\d+:\s*)?")

#: special tokens that belong to what a grammar may ask for
_MARK = re.compile(rb"think|tool|DSML|invoke|arg_")


def xgrammar() -> Any:
    """The library.

    Raises:
        ValueError: it is not installed, or too old.
    """
    try:
        import xgrammar as library
    except ImportError as error:
        raise ValueError(f"structured output needs xgrammar ({error}); pip install 'rorqual[serve]'") from None
    if not hasattr(library, "get_model_structural_tag"):
        raise ValueError("structured output needs xgrammar 0.2.9 or newer; pip install -U xgrammar")
    return library


def reason(error: BaseException) -> str:
    """What an error of the library says, without the place in its source."""
    return _ORIGIN.sub("", str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)


def spellings(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of every token id; empty for special tokens and ids without a token, which no grammar may ask for.

    Marks of reasoning and of tool calls are text to a grammar even where a tokenizer calls them special: their formats need them.

    Raises:
        ValueError: the vocabulary is not byte-level, so that tokens have no bytes of their own.
    """
    if not tokenizer.is_byte_level:
        raise ValueError("structured output needs a tokenizer with a byte-level vocabulary; this one's text is no plain sum of its tokens")
    known = min(vocab_size, tokenizer.vocab_size)
    found = [_spelling(tokenizer, i) for i in range(known)]
    return found + [b""] * (vocab_size - known)


def _spelling(tokenizer: Tokenizer, token_id: int) -> bytes:
    text = tokenizer.token_bytes(token_id)
    return text if not tokenizer.is_special(token_id) or _MARK.search(text) else b""


def token_info(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The vocabulary as xgrammar knows it. Grammars are compiled against it; engine and compiler must have the same.

    Raises:
        ValueError: xgrammar is missing, the vocabulary is not byte-level, or the model has no end token.
    """
    ends = [i for i in eos_ids if 0 <= i < vocab_size]
    if not ends:
        raise ValueError("structured output needs an end token, and the model's configuration names none (eos_token_id)")
    library = xgrammar()
    return library.TokenizerInfo(spellings(tokenizer, vocab_size), library.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=ends)
