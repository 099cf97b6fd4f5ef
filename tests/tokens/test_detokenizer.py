from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.text.detokenizer import Detokenizer, first_stop
from rorqual.engine.text.tokenizer import Tokenizer
from tests.checkpoints import TINY

TOKENIZER = Tokenizer.load(TINY)
UNICODE = st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from("日本語中文한국🦄👩‍👩‍👧🏳️é\u0301\ufffd \n"), max_size=40)
IDS = st.lists(st.integers(0, 4095) | st.sampled_from(TOKENIZER.encode("日本語 🦄 é", add_special_tokens=False)), max_size=60)
#: single-byte tokens: every byte value, so that characters are split in every way
BYTE_IDS = [i for i in range(6, 4096) if len(TOKENIZER.token_bytes(i)) == 1]


def run(ids: Iterable[int], params: SamplingParams, tokenizer: Tokenizer = TOKENIZER, **kwargs: object) -> tuple[str, str | None, int]:
    """Text, stop string met, tokens pushed until then."""
    detokenizer = Detokenizer(tokenizer, params, **kwargs)  # type: ignore[arg-type]
    text, pushed = "", 0
    for token in ids:
        piece = detokenizer.push(token)
        text, pushed = text + piece.text, pushed + 1
        if piece.stop is not None:
            return text, piece.stop, pushed
    piece = detokenizer.flush()
    return text + piece.text, piece.stop, pushed


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(IDS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_to_the_full_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip, ignore_eos=True)
    assert run(ids, params)[0] == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.sampled_from(BYTE_IDS) | st.sampled_from([0, 3, 5000]), max_size=40))
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_for_any_bytes(ids: list[int]) -> None:
    assert run(ids, SamplingParams(), eos_ids=())[0] == TOKENIZER.decode(ids)


@given(UNICODE)
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_text(text: str) -> None:
    ids = encode(text)
    assert run(ids, SamplingParams(skip_special_tokens=False), eos_ids=())[0] == text
    one_by_one = {TOKENIZER.token_bytes(i): i for i in BYTE_IDS}
    ids = [one_by_one[bytes([b])] for b in text.encode() if bytes([b]) in one_by_one]
    assert run(ids, SamplingParams(), eos_ids=())[0] == TOKENIZER.decode(ids)


def test_no_piece_shows_half_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams())
    pieces = [detokenizer.push(i).text for i in encode("日🦄")]
    assert len(pieces) > 2 and "".join(pieces) == "日🦄" and not any("\ufffd" in p for p in pieces)
    assert detokenizer.push(encode("日")[0]).text == "" and detokenizer.flush().text == "\ufffd"


ALPHABET = "ab日🦄 "


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string; the longest one counts."""
    for end in range(1, len(text) + 1):
        met = [s for s in stops if text[:end].endswith(s)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.text(ALPHABET, max_size=30), st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4), st.data())
@settings(max_examples=400, deadline=None)
def test_stop_strings_equal_the_oracle_however_text_is_split(text: str, stops: list[str], data: st.DataObject) -> None:
    split = data.draw(st.sets(st.integers(0, len(text)), max_size=8))
    cuts = [0, *sorted(split), len(text)]
    ids = [i for a, b in zip(cuts, cuts[1:], strict=False) for i in encode(text[a:b])]
    want, stop = oracle(text, stops)
    assert run(ids, SamplingParams(stop=stops))[:2] == (want, stop)
    included = run(ids, SamplingParams(stop=stops, include_stop_str_in_output=True))
    assert included[:2] == (want + (stop or ""), stop)


@pytest.mark.parametrize("text", ["The pass key is 4721. And so on.", "日本語 and 🦄🦄 end"])
def test_a_stop_string_at_every_offset(text: str) -> None:
    ids = encode(text)
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            want, met = oracle(text, [stop])
            found = run(ids, SamplingParams(stop=stop))
            assert found[:2] == (want, met)
            # it is met with the token that completes it, not later
            needed = next(n for n in range(1, len(ids) + 1) if stop in TOKENIZER.decode(ids[:n]).rstrip("\ufffd"))
            assert found[2] == needed


def test_held_text_comes_out_when_it_was_no_stop() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=["ababc"]))
    ids = {c: encode(c)[0] for c in "abcd"}
    pieces = [detokenizer.push(ids[c]).text for c in "ababab"]
    assert pieces == ["", "", "", "", "ab", ""]  # "aba", then "abab" may still go on
    assert detokenizer.push(ids["d"]).text == "ababd"
    assert detokenizer.push(ids["a"]).text == "" and detokenizer.flush().text == "a"


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop="b"))
    a, b = encode("a")[0], encode("b")[0]
    assert detokenizer.push(a).text == "a"
    assert (detokenizer.push(b).text, detokenizer.push(a).text, detokenizer.flush().text) == ("", "", "")
    assert detokenizer.push(a).stop == detokenizer.flush().stop == "b"


def test_end_and_stop_tokens_leave_the_text() -> None:
    ids = encode("The end")
    assert run([*ids, 1], SamplingParams())[0] == "The end"
    assert run([*ids, 1], SamplingParams(skip_special_tokens=False))[0] == "The end"
    assert run([*ids, 1], SamplingParams(skip_special_tokens=False, ignore_eos=True))[0] == "The end<|end|>"
    assert run([*ids, 1], SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True))[0] == "The end<|end|>"
    last = ids[-1]
    assert run(ids, SamplingParams(stop_token_ids=[last]))[0] == TOKENIZER.decode(ids[:-1])
    assert run(ids, SamplingParams(stop_token_ids=[last], include_stop_str_in_output=True))[0] == "The end"
    assert run(ids, SamplingParams(), eos_ids=[last])[0] == TOKENIZER.decode(ids[:-1])


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = {c: encode(c)[0] for c in "abcx"}
    text = [ids[c] for c in "xabxabx"]
    assert run(text, SamplingParams(stop="ab", min_tokens=2))[:2] == ("x", "ab")
    assert run(text, SamplingParams(stop="ab", min_tokens=3))[:2] == ("xabx", "ab")
    assert run(text, SamplingParams(stop=["ab", "abxa"], min_tokens=3))[:2] == ("x", "abxa")  # begun before, ended after
    assert run(text, SamplingParams(stop=["xabc", "ab"], min_tokens=3))[:2] == ("xabx", "ab")
    assert run(text, SamplingParams(stop="ab", min_tokens=7))[:2] == ("xabxabx", None)


def test_first_stop_prefers_the_earliest_end_then_the_longest() -> None:
    assert first_stop("xxabcd", ["bcd", "ab"]) == (2, "ab")
    assert first_stop("xxabcd", ["bc", "abc"]) == (2, "abc")
    assert first_stop("abab", ["ab"], old=2) == (2, "ab")
    assert first_stop("abab", ["aba"], old=3) is None


def test_cost_of_a_token_does_not_grow() -> None:
    """32 times the tokens take about 32 times as long; a quadratic method would take 1000 times."""
    word = encode(" the")[0]
    for params in (SamplingParams(), SamplingParams(stop=["no such", "the theory"])):

        def seconds(n: int, params: SamplingParams = params) -> float:
            detokenizer = Detokenizer(TOKENIZER, params)
            start = time.process_time()
            for _ in range(n):
                detokenizer.push(word)
            return time.process_time() - start

        seconds(1000)
        short = min(seconds(1000) for _ in range(5))
        assert seconds(32000) < 32 * short * 6 + 0.05


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=5), st.data())
@settings(max_examples=400, deadline=None)
def test_no_more_text_waits_than_may_be_a_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=stops, min_tokens=100, max_tokens=100))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12))), len(text)]
    shown = so_far = ""
    for a, b in zip(cuts, cuts[1:], strict=False):
        for token in encode(text[a:b]):
            shown += detokenizer.push(token).text
        so_far = text[:b]
        waits = max(n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n]))
        assert shown == so_far[: len(so_far) - waits]


def test_many_long_stop_strings_cost_little() -> None:
    """Where each was tried at every length for every token, these took some 20 s."""
    others = [chr(0x4E00 + i) * 1024 for i in range(63)]
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=[*others, "a" * 1023 + "b"], max_tokens=4000))
    token = encode("a")[0]
    start = time.process_time()
    shown = "".join(detokenizer.push(token).text for _ in range(3000))
    assert shown == "a" * (3000 - 1023) and time.process_time() - start < 5.0


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like vocabulary: "▁" for spaces, and bytes for unknown characters."""
    words = ["<unk>", "<s>", "▁Hello", "▁world", "▁a", "b", ",", "▁"]
    vocab = [(w, 0.0) for w in words] + [(f"<0x{b:02X}>", 0.0) for b in range(256)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, {})


def test_vocabularies_that_are_not_byte_level() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert not tokenizer.is_byte_level and TOKENIZER.is_byte_level
    spell = {tokenizer.id_to_token(i): i for i in range(tokenizer.vocab_size)}
    ids = [spell["▁Hello"], spell[","], spell["▁world"]]
    for character in "日é🦄":
        ids += [spell[f"<0x{b:02X}>"] for b in character.encode()]
    ids += [spell["▁a"], spell["b"]]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    pieces = [detokenizer.push(i).text for i in ids] + [detokenizer.flush().text]
    assert "".join(pieces) == tokenizer.decode(ids) == "Hello, world日é🦄 ab"
    assert not any("\ufffd" in p for p in pieces)
    byte = {b: spell[f"<0x{b:02X}>"] for b in range(256)}
    stray = [*(byte[b] for b in "日".encode()), byte[0xFF], spell["b"]]
    assert run(stray, SamplingParams(), tokenizer)[0] == "日\ufffdb"  # decoded whole, the stray byte would spoil its neighbours
    assert run(ids, SamplingParams(stop="🦄 a"), tokenizer)[:2] == ("Hello, world日é", "🦄 a")
