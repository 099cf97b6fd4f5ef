"""Grammars by name: both ends agree on what is still there, whatever is used in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.engine.grammar.names import Namer, Shelf
from rorqual.engine.grammar.shelf import Shelves
from rorqual.engine.messages import DropGrammar, KeepGrammar, decode_commands, encode_commands
from tests.grammar.words import compiled, guides, request


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(5, 120))
def test_both_ends_agree(uses, most):
    namer, far = Namer(most), Shelf(most)
    texts = ["x" * (7 + 3 * i) + str(i) for i in range(10)]
    for use in uses:
        new = []
        name = namer.name(texts[use], new.append)
        if new:
            assert far.use(name, len(texts[use]))[0]
        assert far.touch(name), "a request names a grammar that is not there"
        assert far.names() == namer._shelf.names()
        assert far._total <= most or len(far.names()) == 1
        assert set(namer._names.values()) == set(far.names()) == set(namer._texts)


def test_a_grammar_that_could_not_be_sent_is_sent_with_the_next_request():
    namer, sent = Namer(), []

    def full(name):
        raise RuntimeError("the queue is full")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            namer.name("{}", full)
    name = namer.name("{}", sent.append)
    assert sent == [name] and namer.name("{}", full) == name


def test_what_leaders_keep_is_what_some_process_has():
    found = guides()
    shelves, text = Shelves(found), compiled(regex="a+")
    (keep,) = shelves.put(b"1", "n", text)
    assert decode_commands(encode_commands([keep])) == [KeepGrammar(name="n", text=text)]
    found.admit(request("n"))  # before any tick
    assert shelves.has(b"1", "n") and not shelves.has(b"2", "n") and not shelves.has(b"1", "m")
    assert len(shelves.put(b"2", "n", text)) == 1
    assert shelves.forget(b"1") == [] and shelves.forget(b"1") == []
    assert shelves.forget(b"2") == [DropGrammar(name="n")]
    one = request("n")
    found.enter(one)
    found.drop("n")
    assert found.accept(one, 0)[1]  # one that has it goes on in it
    with pytest.raises(ValueError, match="compiled grammar"):
        found.admit(request("n", "other"))
