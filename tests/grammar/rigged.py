"""The stub engine with grammars of its own: no tokenizer, no library, rules over token ids that a test can check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rorqual.engine.plan import StepPlan
from rorqual.engine.request import Request
from rorqual.engine.sampling_params import SamplingParams
from tests.engine.stub import VOCAB, StubEngine


def may_follow(rule: str, tokens: Sequence[int]) -> np.ndarray:
    """[VOCAB] booleans: the tokens that ``rule`` has after ``tokens``: those of one class, which the last token chooses."""
    classes = int(rule)
    last = tokens[-1] if tokens else 0
    return np.arange(VOCAB) % classes == (last // classes + len(tokens)) % classes


class RiggedGuides:
    """Guides whose grammar is a number of classes. It counts, and finds every token that was sampled outside."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.masked = 0
        self.wrong: dict[str, int] = {}  # request -> length from which its mask lies, as a stale one would
        self.dead: dict[str, int] = {}  # request -> length from which nothing may follow

    def __len__(self) -> int:
        return len(self.tokens)

    def admit(self, request: Request) -> None:
        pass

    def enter(self, request: Request) -> None:
        if request.grammar is not None:
            self.tokens[request.request_id] = []

    def leave(self, request_id: str) -> None:
        self.tokens.pop(request_id, None)

    def mask(self, plan: StepPlan, requests: Sequence[Request]) -> list[tuple[Request, str]]:
        places, masks, failed = [], [], []
        for place, row in enumerate(np.flatnonzero(plan.samples).tolist()):
            request = requests[row]
            if request.grammar is None:
                continue
            known = self.tokens[request.request_id]
            assert known == request.output_ids, "a mask is made before the last token is known"
            bits = may_follow(request.grammar, known)
            if len(known) >= self.wrong.get(request.request_id, 1 << 30):
                bits = ~bits
            if len(known) >= self.dead.get(request.request_id, 1 << 30):
                failed.append((request, "nothing may follow"))
            places.append(place)
            masks.append(np.packbits(bits, bitorder="little").view(np.int32))
            self.masked += 1
        if places:
            plan.guided, plan.masks = np.array(places, dtype=np.int32), np.stack(masks)
        return failed

    def accept(self, request: Request, token: int) -> tuple[bool, str | None]:
        if request.grammar is None:
            return False, None
        known = self.tokens[request.request_id]
        if not may_follow(request.grammar, known)[token]:
            return False, f"token {token} does not match the grammar"
        known.append(token)
        return False, None


class RiggedGrammars:
    """The front's compiler: the regex is the grammar."""

    def compile(self, asked: Any) -> str:
        return str(asked.regex)


def rig(engine: StubEngine) -> RiggedGuides:
    """Give ``engine`` such grammars."""
    engine.leader.guides = engine.leader.emitter._guides = guides = RiggedGuides()
    if engine.front is not None:
        engine.front.grammars = RiggedGrammars()
    return guides


def with_rules(params: Sequence[SamplingParams], every: int = 2) -> list[SamplingParams]:
    """Every second request gets a rule of 2 to 9 classes."""
    from dataclasses import replace

    return [replace(p, structured_outputs={"regex": str(2 + i % 8)}) if i % every == 0 else p for i, p in enumerate(params)]


def keeps(tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether an output has the form that was asked for."""
    form = params.structured_outputs
    return form is None or all(may_follow(form.regex, tokens[:i])[t] for i, t in enumerate(tokens))
