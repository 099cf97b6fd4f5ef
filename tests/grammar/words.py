"""A vocabulary of a few words, and grammars over it, for tests that need no model."""

from __future__ import annotations

from rorqual.engine.grammar.compiler import Compiler
from rorqual.engine.grammar.guides import Guides
from rorqual.engine.grammar.structured import Form, StructuredOutputsParams
from rorqual.engine.request import Request
from rorqual.engine.sampling_params import SamplingParams

#: begin, end, a second end and a chat mark are special
WORDS = [
    b"<begin>",
    b"<end>",
    b"<end2>",
    b"<user>",
    *(bytes([c]) for c in range(32, 127)),
    b"ab",
    b"abc",
    b'{"',
    b'":',
    b"true",
    b"\xc3",
    b"\xa9",
]
SPECIAL = range(4)
END, END2 = 1, 2
#: ids above the words belong to nobody
VOCAB = 128 - 16 + 5


class Words:
    """What grammars need of a tokenizer."""

    is_byte_level = True
    vocab_size = len(WORDS)

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id]


def ids(text: str) -> list[int]:
    """One token for each character."""
    return [WORDS.index(bytes([b])) for b in text.encode()]


def text_of(tokens: list[int]) -> str:
    return b"".join(WORDS[t] for t in tokens if t not in SPECIAL).decode()


def compiled(**asked: object) -> str:
    return Compiler(Words(), VOCAB, (END,)).compile(Form(asked=StructuredOutputsParams(**asked)))


def guides(**settings: float) -> Guides:
    return Guides(Words(), VOCAB, (END,), **settings)


def request(grammar: str | None, name: str = "r", **params: object) -> Request:
    values = {"temperature": 0.0, "max_tokens": 100, **params}
    return Request(request_id=name, index=0, prompt_ids=[5], params=SamplingParams(**values), grammar=grammar)
