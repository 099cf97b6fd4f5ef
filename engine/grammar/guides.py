"""The grammars of a replica's requests, on its leader: which tokens may come next, and whether one that came may."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plan import StepPlan
from ..request import Request
from ..text.tokenizer import Tokenizer
from .library import reason, token_info, xgrammar
from .matcher import Mask, Matcher, Spent, mask_words

#: bytes of compiled grammars that are kept beyond the requests that have them
_KEPT_BYTES = 256 << 20
#: seconds for one mask: a grammar that takes longer would hold up every other request
_MASK_SECONDS = 1.0


class Guides:
    """One for each leader. Nothing is imported or built before the first grammar comes."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int], *, mask_seconds: float = _MASK_SECONDS
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._mask_seconds = mask_seconds
        self._info: Any = None
        self._preparing = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()  # text -> compiled grammar, the least recently used first
        self._spent: dict[str, Spent] = {}  # text -> time that its requests take, while it is kept
        self._named: dict[str, str] = {}  # name -> text
        self._matchers: dict[str, Matcher] = {}  # by request id

    def __len__(self) -> int:
        """Requests with a grammar."""
        return len(self._matchers)

    def prepare(self) -> None:
        """Import the library and read the vocabulary now, before requests wait for it.

        Raises:
            ValueError: structured output is not possible with this model; the message says why.
        """
        with self._preparing:
            if self._info is None:
                if self._tokenizer is None:
                    raise ValueError("structured output needs a tokenizer; leave out skip_tokenizer_init")
                self._info = token_info(self._tokenizer, self._vocab_size, self._eos_ids)

    def warm(self, after_s: float = 3.0) -> None:
        """``prepare`` in ``after_s`` seconds, beside the work of this thread; what is wrong is told to who needs a grammar."""
        if self._tokenizer is not None:
            timer = threading.Timer(after_s, self._warm)
            timer.daemon = True
            timer.start()

    def _warm(self) -> None:
        with contextlib.suppress(ValueError):
            self.prepare()

    def keep(self, name: str, text: str) -> None:
        """Requests call the compiled grammar ``text`` by this name."""
        self._named[name] = text

    def drop(self, name: str) -> None:
        """They do not any more; those that have it go on."""
        self._forget(self._named.pop(name, ""))

    def _forget(self, text: str) -> None:
        self._kept.pop(text, None)
        self._spent.pop(text, None)

    def check(self, grammar: str) -> None:
        """Refuse a compiled grammar (or name of one) that is none, or one for other tokens than this engine's.

        Raises:
            ValueError: with the library's reason.
        """
        self._compiled(grammar)

    def admit(self, request: Request) -> None:
        """Refuse a request whose form cannot be kept.

        Raises:
            ValueError: as ``check``; or its parameters ask for a form, and nobody has compiled it.
        """
        if request.grammar is not None:
            self.check(request.grammar)
        elif request.params.structured_outputs is not None:
            raise ValueError(f"request {request.request_id} asks for structured output, but comes without its compiled grammar")

    def enter(self, request: Request) -> None:
        """An admitted request begins; nothing happens if it has no grammar.

        Raises:
            ValueError: the library cannot follow this grammar.
        """
        if request.grammar is None:
            return
        compiled = self._compiled(request.grammar)
        assert self._tokenizer is not None
        # A stop token that is text counts as text; it ends the request when the grammar takes it.
        special = [i for i in request.params.stop_ids if i < self._vocab_size and self._tokenizer.is_special(i)]
        ends = sorted({*(i for i in self._eos_ids if i < self._vocab_size), *special})
        try:
            inner = xgrammar().GrammarMatcher(compiled, override_stop_tokens=ends)
        except RuntimeError as error:
            raise ValueError(f"the grammar cannot be followed: {error}") from None
        spent = self._spent.setdefault(self._named.get(request.grammar, request.grammar), Spent())
        self._matchers[request.request_id] = Matcher(inner, self._vocab_size, ends=ends, held=request.params.min_tokens, spent=spent)

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        self._matchers.pop(request_id, None)

    def mask(self, plan: StepPlan, requests: Sequence[Request]) -> list[tuple[Request, str]]:
        """Write into ``plan`` which tokens its rows may sample; ``requests`` are those of its rows.

        Returns requests that cannot go on, with the reason; the results of their rows must be dropped.
        """
        places, masks, failed = [], [], []
        for place, row in enumerate(np.flatnonzero(plan.samples).tolist()):
            request = requests[row]
            matcher = self._matchers.get(request.request_id) if request.grammar is not None else None
            if matcher is None:
                continue
            mask: Mask = np.zeros(mask_words(self._vocab_size), dtype=np.int32)
            problem = self._fill(matcher, mask)
            if problem is not None:  # its result is dropped; whatever it is, it is no text
                mask[:] = 0
                mask.view(np.uint32)[matcher.ends[0] >> 5] = 1 << (matcher.ends[0] & 31)
                failed.append((request, problem))
            places.append(place)
            masks.append(mask)
        if places:
            plan.guided = np.array(places, dtype=np.int32)
            plan.masks = np.stack(masks)
        return failed

    def _fill(self, matcher: Matcher, mask: Mask) -> str | None:
        """Fill one mask; what is wrong if the request cannot go on."""
        start = time.monotonic()
        try:
            some = matcher.fill(mask)
        except RuntimeError as error:
            return f"the grammar failed: {reason(error)}"
        spent = time.monotonic() - start
        if spent > self._mask_seconds:
            return f"the grammar took {spent:.1f} s to tell what may come next, more than the {self._mask_seconds:g} s it has; simplify it"
        return matcher.spent.problem if some else "the grammar leaves no token that may come next"

    def accept(self, request: Request, token: int) -> tuple[bool, str | None]:
        """Take a token that ``request`` got: whether its grammar is through now, and what is wrong, if anything."""
        matcher = self._matchers.get(request.request_id) if request.grammar is not None else None
        if matcher is None:
            return False, None
        if not matcher.accept(token):
            return False, f"token {token} does not match the grammar"
        return matcher.ended, None

    def _compiled(self, grammar: str) -> Any:
        """The grammar of its text, kept for others with the same one."""
        grammar = self._named.get(grammar, grammar)
        found = self._kept.get(grammar)
        if found is None:
            if not grammar.startswith("{"):
                raise ValueError(f"no compiled grammar is kept under the name {grammar[:80]!r}; send the request again")
            self.prepare()
            try:
                found = xgrammar().CompiledGrammar.deserialize_json(grammar, self._info)
            except RuntimeError as error:
                raise ValueError(f"the compiled grammar does not fit this engine: {reason(error)}") from None
            self._kept[grammar] = found
            while len(self._kept) > 1 and sum(map(len, self._kept)) > _KEPT_BYTES:
                self._forget(next(iter(self._kept)))
        self._kept.move_to_end(grammar)
        return found
