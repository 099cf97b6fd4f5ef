"""Requests of the datasets: sizes, what is shared, arrivals, and refusals that name file and line."""

import json

import pytest

from rorqual.engine.text.tokenizer import Tokenizer
from rorqual.launch.bench.datasets.config import DatasetConfig
from rorqual.launch.bench.datasets.make import Words, dataset_of, make_requests, with_text
from rorqual.launch.bench.datasets.random_ids import random_requests
from rorqual.launch.bench.datasets.request import Request, Turn, flat
from tests.checkpoints import TINY


def make(words=None, **settings):
    return make_requests(DatasetConfig(**settings), words or Words(100), seed=3, input_len=10)


@pytest.fixture(scope="module")
def tiny():
    tokenizer = Tokenizer.load(TINY)
    return Words(tokenizer.vocab_size, tokenizer.encode, tokenizer.decode)


def test_random_prompts_share_their_prefix():
    found = make(num_prompts=5, input_len=6, output_len=2, random_prefix_len=4)
    assert len(found) == 5 and all(len(r.token_ids) == 10 and r.output_len == 2 for r in found)
    assert len({tuple(r.token_ids[:4]) for r in found}) == 1 and len({tuple(r.token_ids) for r in found}) == 5
    assert [len(r.token_ids) for r in make(num_prompts=2)] == [10, 10] and make(num_prompts=2)[0].output_len == 128


def test_random_text_has_as_many_tokens_as_asked_for(tiny):
    requests = with_text(make(tiny, num_prompts=30, input_len=40, output_len=2), tiny)
    exact = sum(len(tiny.encode(r.text)) == 40 for r in requests)
    assert exact >= 25 and all(r.token_ids == tiny.encode(r.text) for r in requests)


def test_shared_prefixes():
    found = make(
        dataset_name="generated-shared-prefix", gsp_num_groups=3, gsp_prompts_per_group=4, gsp_system_prompt_len=8, gsp_question_len=2,
        gsp_output_len=5,
    )  # fmt: skip
    groups = {}
    for r in found:
        groups.setdefault(tuple(r.token_ids[:8]), []).append(r)
    assert len(found) == 12 and sorted(map(len, groups.values())) == [4, 4, 4] and {r.output_len for r in found} == {5}
    first = [tuple(r.token_ids[:8]) for r in found]
    assert first != sorted(first, key=first.index), "groups are mixed"


def test_prefix_repetition_deals_the_prompts():
    settings = {"prefix_repetition_num_prefixes": 3, "prefix_repetition_prefix_len": 5, "prefix_repetition_suffix_len": 2}
    found = make(dataset_name="prefix_repetition", num_prompts=8, prefix_repetition_output_len=4, **settings)
    counts = {}
    for r in found:
        counts[tuple(r.token_ids[:5])] = counts.get(tuple(r.token_ids[:5]), 0) + 1
    assert len(found) == 8 and sorted(counts.values()) in ([2, 3, 3], [3, 3, 2]) and all(len(r.token_ids) == 7 for r in found)


def test_conversations_and_their_flat_form():
    (one, two) = make(
        dataset_name="multi-turn", multi_turn_num_conversations=2, multi_turn_num_turns=3, multi_turn_context_len=20, multi_turn_turn_len=4,
        multi_turn_output_len=5,
    )  # fmt: skip
    assert len(one.token_ids) == 20 and [len(t.token_ids) for t in one.then] == [4, 4] and one.token_ids != two.token_ids
    rows = flat([one])
    assert [len(r.token_ids) for r in rows] == [20, 29, 38] and [r.output_len for r in rows] == [5, 5, 5]
    assert rows[2].token_ids[:29] == rows[1].token_ids and rows[1].token_ids[:20] == one.token_ids
    assert flat([Request(token_ids=[1], output_len=2, then=(Turn(token_ids=[9], output_len=3),))])[1].token_ids == [1, 1, 1, 9]


def test_a_trace_keeps_arrivals_lengths_and_what_is_shared(tmp_path):
    lines = [
        {"timestamp": 5000, "input_length": 10, "output_length": 2, "hash_ids": [7, 8, 9]},
        {"timestamp": 4000, "input_length": 7, "output_length": 1, "hash_ids": [7, 8]},
        {"timestamp": 9000.5, "input_length": 6, "output_length": 3},
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = make(dataset_name="mooncake", dataset_path=str(file), timed_trace_chunk_hash_size=4, mooncake_slowdown_factor=2.0)
    assert [r.at for r in found] == [0.0, 2.0, pytest.approx(10.001)] and [len(r.token_ids) for r in found] == [7, 10, 6]
    assert [r.output_len for r in found] == [1, 2, 3]
    a, b = found[0].token_ids, found[1].token_ids
    assert a == b[:7], "the same blocks are the same tokens"
    assert len(make(dataset_name="timed_trace", dataset_path=str(file), timed_trace_chunk_hash_size=4, num_prompts=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 must be an object, found list"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', '"input_length" must be a whole number of 1 or more, found 0'),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', '"timestamp" must be a number'),
        (
            '{"timestamp": 1, "input_length": 4, "output_length": 1, "hash_ids": [1, 2]}',
            "2 blocks of 4 tokens are more than the prompt of 4",
        ),
        ('{"timestamp": 1, "input_length": 4, "output_length": 1, "hash_ids": [-1]}', "whole numbers"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path, line, message):
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 4, "output_length": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        make(dataset_name="timed_trace", dataset_path=str(file), timed_trace_chunk_hash_size=4)


def test_sharegpt(tmp_path, tiny):
    def talk(prompt, answer, keys=("from", "value")):
        return {"conversations": [{keys[0]: "human", keys[1]: prompt}, {keys[0]: "gpt", keys[1]: answer}]}

    long = "word " * 3000
    good, other = (
        talk("Tell me about the whales of the sea.", "They are large and swim."),
        talk("Who was Emma, and why?", "She was handsome."),
    )
    talks = [
        good,
        talk("x", "y"),
        talk(long, "an answer of some tokens"),
        {"conversations": []},
        {"id": 3},
        talk("a b c d e f g", 5),
        other,
    ]
    file = tmp_path / "s.json"
    file.write_text(json.dumps(talks))
    settings = {"dataset_name": "sharegpt", "dataset_path": str(file)}
    found = make(tiny, num_prompts=2, **settings)
    assert {r.text for r in found} == {"Tell me about the whales of the sea.", "Who was Emma, and why?"}
    assert {r.output_len for r in found} == {len(tiny.encode(a)) for a in ("They are large and swim.", "She was handsome.")}
    assert len(make(tiny, num_prompts=5, **settings)) == 5 and len(make(tiny, num_prompts=5, no_oversample=True, **settings)) == 2
    assert {r.output_len for r in make(tiny, num_prompts=2, output_len=9, **settings)} == {9}
    assert [r.text[:4] for r in make(tiny, num_prompts=2, disable_shuffle=True, **settings)] == ["Tell", "Who "]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        make(num_prompts=2, **settings)
    for content, message in (("[]", "none of 0 conversations"), ("{}", "must be a JSON list"), ("[", "is not JSON")):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            make(tiny, **settings)


def test_names_and_files_go_together(tmp_path):
    assert dataset_of(DatasetConfig()) == "random" and dataset_of(DatasetConfig(dataset_path="x")) == "file"
    with pytest.raises(ValueError, match="--dataset sharegpt needs --dataset-path"):
        dataset_of(DatasetConfig(dataset_name="sharegpt"))
    with pytest.raises(ValueError, match="--dataset multi-turn takes no --dataset-path"):
        dataset_of(DatasetConfig(dataset_name="multi-turn", dataset_path="x"))
    with pytest.raises(ValueError, match="--gsp-num-groups must be at least 1, found 0"):
        make(dataset_name="generated-shared-prefix", gsp_num_groups=0)
    with pytest.raises(ValueError, match="give --vocab-size N or --tokenizer FOLDER"):
        make(Words(None), num_prompts=1)
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": [4, 5]}\n')
    assert make(dataset_path=str(file), output_len=7) == [Request(token_ids=[4, 5], output_len=7)]


def test_warm_up_prompts_are_others():
    (r,) = random_requests(count=1, input_len=9, output_len=4, range_ratio=0.0, vocab_size=100, seed=1)
    assert r.turned().token_ids == r.token_ids[::-1] and r.turned().output_len == 4
