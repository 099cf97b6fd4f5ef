"""Prompts from flags and files."""

import json

import pytest

from rorqual.launch.prompts import TINY_PROMPTS, PromptItem, engine_prompts, gather_prompts, read_prompts, user


def test_json_lines_of_every_kind(tmp_path):
    file = tmp_path / "p.jsonl"
    talk = [{"role": "user", "content": "hé"}]
    rows = [{"prompt": "a", "id": 1}, {"prompt_token_ids": [1, 2]}, {"messages": talk}, "b", {"prompt": [3]}]
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n", encoding="utf-8")
    assert read_prompts(str(file)) == [
        PromptItem(text="a"),
        PromptItem(token_ids=(1, 2)),
        PromptItem(messages=tuple(talk)),
        PromptItem(text="b"),
        PromptItem(token_ids=(3,)),
    ]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_only_line_feeds_end_a_line(tmp_path, mark):
    """JSON strings may hold these as they are; ``generate --output`` writes them so."""
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": f"one{mark}two"}, ensure_ascii=False) + '\r\n\n{"prompt": "three"}\n', encoding="utf-8")
    assert [p.text for p in read_prompts(str(file))] == [f"one{mark}two", "three"]
    text = tmp_path / "p.txt"
    text.write_text(f"one{mark}two\nthree", encoding="utf-8")
    assert [p.text for p in read_prompts(str(text))] == [f"one{mark}two", "three"]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text('one\n\n{"two"\n')
    assert [p.text for p in read_prompts(str(file))] == ["one", '{"two"']


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "line 2 is not JSON: Expecting value at column 1 (one prompt a line? name the file .txt)"),
        ("[1]", "line 2 must be an object or a string, found list"),
        ('{"text": "a"}', 'line 2 needs one of "prompt", "prompt_token_ids", "messages", found [\'text\']'),
        ('{"prompt": "a", "messages": []}', "found ['prompt', 'messages']"),
        ('{"prompt": 3}', 'line 2: "prompt" must be text, found int'),
        ('{"prompt_token_ids": [1, "2"]}', 'line 2: "prompt_token_ids" must be a list of integers'),
        ('{"prompt_token_ids": [true]}', 'line 2: "prompt_token_ids" must be a list of integers'),
        ('{"messages": []}', 'line 2: "messages" must be a list of objects with "role" and "content"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        read_prompts(str(file))
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_empty_and_binary_files(tmp_path):
    empty, binary = tmp_path / "e.jsonl", tmp_path / "b.jsonl"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(str(empty))
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_prompts(str(binary))


def test_flags_and_file_come_together_and_chat_wraps_texts(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("two\n")
    assert [p.text for p in gather_prompts(["one"], str(file), chat=False, model="m")] == ["one", "two"]
    assert gather_prompts(["one"], None, chat=True, model="m") == [user("one")]


def test_only_the_embedded_model_has_prompts_of_its_own():
    assert gather_prompts([], None, chat=False, model="tiny") == list(TINY_PROMPTS)
    assert all(p.messages for p in gather_prompts([], None, chat=True, model="tiny"))
    with pytest.raises(ValueError, match="no prompt; give --prompt TEXT or --prompts-file FILE"):
        gather_prompts([], None, chat=False, model="other")


def test_engine_prompts_renders_conversations():
    class Fake:
        def render_chats(self, talks):
            return [[len(t), 9] for t in talks]

    items = [PromptItem(text="a"), user("b"), PromptItem(token_ids=(4, 5))]
    assert engine_prompts(Fake(), items) == ["a", [1, 9], [4, 5]]
    assert items[1].shown == "user: b" and items[2].shown == "2 token ids"
