"""A request's place in its grammar: masks, ends, minimum lengths, and everything that must fail closed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rorqual.engine.grammar.guides import Guides
from rorqual.engine.grammar.library import spellings
from rorqual.engine.grammar.matcher import Spent
from rorqual.engine.plan import StepPlan
from tests.grammar.words import END, END2, SPECIAL, VOCAB, WORDS, Words, compiled, guides, ids, request, text_of

pytest.importorskip("xgrammar")


def plan_of(*samples: bool) -> StepPlan:
    return StepPlan(step=0, slots=np.arange(len(samples), dtype=np.int32), samples=np.array(samples, dtype=np.bool_))


def allowed(found, one) -> list[int]:
    """Tokens that the only row of a plan may sample."""
    plan = plan_of(True)
    assert found.mask(plan, [one]) == []
    assert plan.guided.tolist() == [0] and plan.masks.shape == (1, -(-VOCAB // 32))
    return np.flatnonzero(np.unpackbits(plan.masks.view(np.uint8), bitorder="little")).tolist()


def test_only_what_the_grammar_has_next_is_allowed_and_the_end_only_when_it_is_through():
    found, one = guides(), request(compiled(regex="ab+"))
    found.enter(one)
    spelled = [WORDS[t] for t in allowed(found, one)]
    assert sorted(spelled) == [b"a", b"ab"]
    assert found.accept(one, WORDS.index(b"a")) == (False, None)
    assert allowed(found, one) == ids("b")
    found.accept(one, ids("b")[0])
    assert sorted(allowed(found, one)) == sorted([END, *ids("b")])
    assert found.accept(one, END) == (True, None)


def test_special_tokens_and_ids_without_a_token_never_come():
    """Even where any text may: a chat mark inside a JSON string would be a way out of it."""
    found, one = guides(), request(compiled(regex="[^x]*"))
    found.enter(one)
    may = allowed(found, one)
    assert set(SPECIAL) & set(may) == {END} and max(may) < len(WORDS) and ids("x")[0] not in may and len(may) > 90


def test_marks_of_reasoning_and_tools_are_text_even_where_they_are_special():
    class Marked(Words):
        def token_bytes(self, token_id):
            return {2: b"</think>", 3: "<｜tool▁calls▁begin｜>".encode()}.get(token_id, super().token_bytes(token_id))

    found = spellings(Marked(), VOCAB)
    assert found[:4] == [b"", b"", b"</think>", "<｜tool▁calls▁begin｜>".encode()] and found[-1] == b"" and len(found) == VOCAB


def test_a_token_that_does_not_fit_is_told():
    found, one = guides(), request(compiled(regex="ab+"))
    found.enter(one)
    ended, problem = found.accept(one, ids("b")[0])
    assert not ended and "does not match the grammar" in problem
    for token in (END, 3, VOCAB - 1):
        assert found.accept(one, token)[1]


def test_minimum_length_holds_the_end_back_only_where_the_text_can_go_on():
    found, long, fixed = guides(), request(compiled(regex="a+"), min_tokens=3), request(compiled(regex="a"), "s", min_tokens=3)
    found.enter(long), found.enter(fixed)
    a = ids("a")[0]
    for i in range(3):
        assert END not in allowed(found, long), i
        found.accept(long, a)
    assert END in allowed(found, long)
    found.accept(fixed, a)
    assert allowed(found, fixed) == [END]  # nothing else has the form


def test_special_stop_tokens_end_it_and_stop_tokens_that_are_text_stay_text():
    b = ids("b")[0]
    found, one = guides(), request(compiled(regex="ab*"), stop_token_ids=[END2, b])
    found.enter(one)
    assert sorted(WORDS[t] for t in allowed(found, one)) == [b"a", b"ab"]
    found.accept(one, ids("a")[0])
    assert sorted(allowed(found, one)) == sorted([END, END2, b])
    assert found.accept(one, END2) == (True, None)


def test_several_rows_have_masks_of_their_own_and_others_none():
    found, grammar = guides(), compiled(regex="ab+")
    first, second, free = request(grammar, "1"), request(compiled(choice=["x", "yes"]), "2"), request(None, "3")
    found.enter(first), found.enter(second), found.enter(free)
    plan = plan_of(True, False, True, True)  # the second row is a chunk of a prompt that samples nothing
    assert found.mask(plan, [free, first, first, second]) == [] and plan.guided.tolist() == [1, 2]
    bits = np.unpackbits(plan.masks.view(np.uint8), axis=1, bitorder="little")
    assert sorted(WORDS[t] for t in np.flatnonzero(bits[0])) == [b"a", b"ab"]
    assert sorted(WORDS[t] for t in np.flatnonzero(bits[1])) == [b"x", b"y"]
    plan = plan_of(True)
    assert found.mask(plan, [free]) == [] and not len(plan.guided)


def test_a_dead_end_ends_the_request_with_its_reason():
    """The vocabulary cannot spell U+00E8: only half of it has a token."""
    for impossible in ("è", "中"):
        with pytest.raises(ValueError, match="no text of this model's tokens"):
            compiled(regex=impossible)
    found, one = guides(), request(compiled(regex="a|bè"))
    found.enter(one)
    found.accept(one, ids("b")[0])
    plan = plan_of(True)
    found.accept(one, WORDS.index(b"\xc3"))
    ((failed, why),) = found.mask(plan, [one])
    assert failed is one and "no token that may come next" in why
    assert plan.masks.any()  # the row is computed, and dropped; a row without any token would be no distribution


def test_a_grammar_that_takes_too_long_ends_its_request_and_not_the_others():
    found = guides(mask_seconds=0.0)
    one = request(compiled(regex="a+"))
    found.enter(one)
    ((_, why),) = found.mask(plan_of(True), [one])
    assert "more than the 0 s" in why


def test_a_grammar_that_takes_longer_and_longer_ends_its_requests_and_not_the_others():
    """Each token of an ambiguous grammar takes longer than the one before: this one took a second for a token after a thousand."""
    found = guides()
    text = compiled(grammar='root ::= root root | "a" | "b"')
    slow, second, other = request(text, name="slow"), request(text, name="second"), request(compiled(regex="a*"), name="other")
    for one in (slow, second, other):
        found.enter(one)
    a, done = ids("a")[0], 0
    while not (failed := found.mask(plan_of(True, True), [slow, other])) and done < 2000:
        assert found.accept(slow, a) == found.accept(other, a) == (False, None)
        done += 1
    assert [(one.request_id, "far more than 10 ms a token" in why) for one, why in failed] == [("slow", True)], done
    assert 50 < done < 1500
    # time is the grammar's: more requests with it get no more
    assert [one.request_id for one, _ in found.mask(plan_of(True, True), [second, other])] == ["second"]


def test_time_that_a_grammar_took_is_forgotten(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rorqual.engine.grammar.matcher.time", SimpleNamespace(monotonic=lambda: now[0]))
    spent = Spent()
    for _ in range(1000):
        spent.add(0.009, 1)  # slow, but what each token has
    assert spent.problem is None
    spent.add(1.1, 1)
    assert spent.problem is not None
    now[0] += 60.0
    spent.add(0.0, 0)
    assert spent.problem is None


def test_requests_leave():
    found, one = guides(), request(compiled(regex="a+"))
    found.enter(one)
    assert len(found) == 1
    found.leave("r"), found.leave("r"), found.leave("never")
    assert len(found) == 0 and found.accept(one, 0) == (False, None)


def test_grammars_of_other_tokens_and_texts_that_are_none_are_refused():
    grammar = compiled(regex="a")
    found = guides()
    found.check(grammar)
    for wrong in ("", "{", "null", "[]", "{}", "\x00", json.dumps({**json.loads(grammar), "grammar": 3})):
        with pytest.raises(ValueError, match="compiled grammar"):
            found.check(wrong)
    with pytest.raises(ValueError, match="does not fit this engine"):
        Guides(Words(), VOCAB + 1, (END,)).check(grammar)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Guides(None, VOCAB, (END,)).check(grammar)
    with pytest.raises(ValueError, match="needs an end token"):
        Guides(Words(), VOCAB, ()).check(grammar)


def test_a_form_without_its_grammar_is_refused():
    with pytest.raises(ValueError, match="without its compiled grammar"):
        guides().admit(request(None, structured_outputs={"regex": "a"}))
    guides().admit(request(None))


def test_text_of_walks():
    """Whatever walk the masks allow, the text has the form."""
    found, grammar = guides(), compiled(json={"type": "object", "properties": {"ab": {"type": "boolean"}}, "required": ["ab"]})
    draw = np.random.default_rng(1)
    for walk in range(30):
        one = request(grammar, str(walk))
        found.enter(one)
        tokens: list[int] = []
        ended = False
        while not ended and len(tokens) < 200:
            tokens.append(int(draw.choice(allowed(found, one))))
            ended, problem = found.accept(one, tokens[-1])
            assert problem is None
        assert ended and set(json.loads(text_of(tokens))) == {"ab"}
