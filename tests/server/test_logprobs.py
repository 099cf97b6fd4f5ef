"""Log-probabilities of tokens that share a text."""

import pytest

from rorqual.engine.server.openai.logprobs import Spelling, TextLogprobs, chat_logprobs
from rorqual.engine.server.openai.offsets import Offsets
from rorqual.engine.server.texts import Texts
from tests.server.fake_engine import TINY


@pytest.fixture(scope="module")
def texts():
    found = Texts(str(TINY), model_type="deepseek_v32")
    yield found
    found.close()


@pytest.fixture(scope="module")
def halves(texts):
    """Tokens that are part of a character."""
    return [token for token in range(texts.tokenizer.vocab_size) if texts.spelling(token)[0] == "\ufffd"][:4]


def tops(texts, row, top):
    return TextLogprobs(top, Spelling(texts, False), Offsets(texts, keep_special=False)).make([row])["top_logprobs"][0]


def test_none_is_lost_among_tokens_with_one_text(texts, halves):
    a, b, c, d = halves
    word = next(iter(texts.tokenizer.encode("whale", add_special_tokens=False)))
    row = [[b, -1.5, 2.0], [a, -0.5, 1.0], [word, -2.0, 3.0], [c, -2.5, 4.0]]  # the sampled one is the second best
    expected = {f"token_id:{a}": -0.5, "\ufffd": -1.5, texts.spelling(word)[0]: -2.0, f"token_id:{c}": -2.5}
    assert tops(texts, row, 4) == expected and list(tops(texts, row, 4)) == list(expected)
    row = [[d, -9.0, 700.0], [a, -0.5, 1.0], [b, -1.5, 2.0]]  # it is none of the best
    assert tops(texts, row, 2) == {"\ufffd": -9.0, f"token_id:{a}": -0.5, f"token_id:{b}": -1.5}
    row = [[word, -0.1, 1.0], [a, -0.5, 2.0], [b, -1.5, 3.0]]
    assert tops(texts, row, 3) == {texts.spelling(word)[0]: -0.1, "\ufffd": -0.5, f"token_id:{b}": -1.5}


def test_chats_list_all(texts, halves):
    row = [[token, -0.5 * place, place + 1.0] for place, token in enumerate(halves)]
    (entry,) = chat_logprobs([row], 4, Spelling(texts, False))
    assert [e["token"] for e in entry["top_logprobs"]] == ["\ufffd"] * 4
    assert [bytes(e["bytes"]) for e in entry["top_logprobs"]] == [texts.spelling(token)[1] for token in halves]
    assert len({tuple(e["bytes"]) for e in entry["top_logprobs"]}) == 4
