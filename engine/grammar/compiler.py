"""From what a caller asked for to a compiled grammar, as text that the engine reads."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..text.tokenizer import Tokenizer
from .library import reason, token_info, xgrammar
from .matcher import Matcher, mask_words
from .schema_check import check_schema
from .structured import Form, StructuredOutputsParams, as_json

#: characters of a compiled grammar; larger ones would hold up the engine when they are read
MOST_CHARACTERS = 64 << 20
#: spaces and newlines in a row, between the parts of JSON: models may otherwise write them for ever
MOST_SPACES = 24
#: a walk through a new grammar: tokens, and seconds for all and for one of them
_TRIAL_TOKENS, _TRIAL_SECONDS, _SLOW_SECONDS = 256, 0.5, 0.25


class Compiler:
    """Compiles for one vocabulary. Not for hostile input: what is compiled may take any time and memory (see server/structured)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """``vocab_size`` is the width of the model's logits.

        Raises:
            ValueError: see ``token_info``.
        """
        self._vocab_size = vocab_size
        self._ends = [i for i in eos_ids if i < vocab_size]
        self._info = token_info(tokenizer, vocab_size, eos_ids)
        # One thread: a child of a fork has no others.
        self._inner = xgrammar().GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, form: Form) -> str:
        """The compiled grammar of ``form``.

        Raises:
            ValueError: the form is wrong, cannot be kept, or no output of this vocabulary has it; with the reason.
        """
        try:
            compiled = self._inner.compile_grammar(self._whole(form))
            self._try(compiled)
            text: str = compiled.serialize_json()
        except (RuntimeError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"structured output: {reason(error)}") from None
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"structured output: the grammar has {len(text)} characters, {MOST_CHARACTERS} are allowed; simplify it")
        return text

    def _whole(self, form: Form) -> Any:
        """Reasoning, then what was asked for, or calls of tools."""
        library = xgrammar()
        parts = [] if form.asked is None else [self._grammar(form.asked)]
        if form.tools is not None:
            for function in (tool.get("function", {}) for tool in form.tools.get("tools", ())):
                if function.get("strict") and function.get("parameters") is not None:
                    check_schema(function["parameters"])
            tag = library.get_model_structural_tag(**{**form.tools, "reasoning": "disabled", "max_whitespace_cnt": MOST_SPACES})
            parts.append(library.Grammar.from_structural_tag(tag))
        assert parts, "a form asks for something"
        grammar = parts[0] if len(parts) == 1 else library.Grammar.union(*parts)
        before = _reasoning(form)
        return grammar if before is None else library.Grammar.concat(_tag(before), grammar)

    def _grammar(self, asked: StructuredOutputsParams) -> Any:
        library = xgrammar()
        if asked.json is not None or asked.json_object:
            schema = {"type": "object"} if asked.json is None else as_json(asked.json, "the JSON schema")
            check_schema(schema)
            compact = asked.disable_any_whitespace
            spaces = None if compact else MOST_SPACES
            return library.Grammar.from_json_schema(json.dumps(schema), any_whitespace=not compact, max_whitespace_cnt=spaces)
        if asked.regex is not None:
            return library.Grammar.from_regex(asked.regex)
        if asked.grammar is not None:
            return library.Grammar.from_ebnf(asked.grammar)
        if asked.choice is not None:
            return _tag({"type": "or", "elements": [{"type": "const_string", "value": text} for text in asked.choice]})
        assert asked.structural_tag is not None
        tag = as_json(asked.structural_tag, "the structural tag")
        if not isinstance(tag, dict):
            raise ValueError(f"the structural tag must be a JSON object, found {type(tag).__name__}")
        return library.Grammar.from_structural_tag(json.dumps(tag))

    def _try(self, compiled: Any) -> None:
        """Walk through the grammar at random, to see that it leads somewhere and says in time what may come next."""
        matcher = Matcher(xgrammar().GrammarMatcher(compiled), self._vocab_size, ends=self._ends)
        mask = np.zeros(mask_words(self._vocab_size), dtype=np.int32)
        draw, until = np.random.default_rng(0), time.monotonic() + _TRIAL_SECONDS
        forced = True  # there was no choice so far
        for _ in range(_TRIAL_TOKENS):
            start = time.monotonic()
            possible = matcher.fill(mask)
            spent = time.monotonic() - start
            if spent > _SLOW_SECONDS:
                raise ValueError(f"structured output: one token of this form takes {spent:.2f} s to find; simplify it")
            if not possible:
                if forced:
                    raise ValueError("structured output: no text of this model's tokens has the form that is asked for")
                return  # a way that leads nowhere; there are others
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            forced = forced and len(allowed) == 1
            matcher.accept(int(draw.choice(allowed)))
            if matcher.ended or time.monotonic() > until:
                return


def _reasoning(form: Form) -> dict[str, Any] | None:
    """What comes before the form, as a structural tag's format."""
    if form.reasoning == "disabled":
        return None
    begin = "" if form.reasoning == "enabled" else form.begin
    block = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": form.end}
    return block if form.reasoning == "enabled" else {"type": "optional", "content": block}


def _tag(form: dict[str, Any]) -> Any:
    return xgrammar().Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
