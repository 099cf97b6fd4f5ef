from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rorqual.engine.text.tokenizer import Tokenizer
from tests.checkpoints import TINY

REFERENCE = json.loads((TINY / "eval" / "reference.json").read_text())["prompts"]
PROMPTS = [json.loads(line) for line in (TINY / "eval" / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def copy_without(folder: Path, **changes: object) -> Path:
    """A folder with the embedded tokenizer and a changed configuration (None: key left out)."""
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    for name, value in changes.items():
        config.pop(name) if value is None else config.update({name: value})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(TINY / "tokenizer.json", folder / "tokenizer.json")
    return folder


def test_all_reference_prompts(tokenizer: Tokenizer) -> None:
    assert len(PROMPTS) == len(REFERENCE) == 24
    for prompt, reference in zip(PROMPTS, REFERENCE, strict=True):
        assert tokenizer.encode(prompt["prompt"]) == reference["prompt_ids"]
        assert tokenizer.decode(reference["ids"], skip_special_tokens=False) == reference["text"]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.vocab_size == 4096
    assert tokenizer.special_ids == set(range(6)) and tokenizer.is_special(5) and not tokenizer.is_special(6)
    assert tokenizer.id_to_token(3) == "<|User|>" and tokenizer.token_to_id("<|User|>") == 3
    assert tokenizer.id_to_token(5000) is None and tokenizer.token_to_id("no such token") is None
    text = "<|User|>Hello.<|Assistant|>"
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)[1:]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "Hello." and tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>" + text
    assert tokenizer.decode([5000]) == "" and tokenizer.token_bytes(5000) == b""


def test_bos_and_eos_follow_the_configuration(tmp_path: Path) -> None:
    plain = Tokenizer.load(TINY).encode("In the beginning")[1:]
    for bos, eos in ((True, True), (False, True), (False, False)):
        ids = Tokenizer.load(copy_without(tmp_path, add_bos_token=bos, add_eos_token=eos)).encode("In the beginning")
        assert ids == [0] * bos + plain + [1] * eos
    # nothing said: the post-processor of tokenizer.json puts the begin token
    assert Tokenizer.load(copy_without(tmp_path, add_bos_token=None, add_eos_token=None)).encode("In the beginning") == [0, *plain]
    named = Tokenizer.load(copy_without(tmp_path, bos_token={"content": "<|User|>", "special": True}))
    assert named.bos_id == 3 and named.encode("In the beginning") == [3, *plain]


def test_without_a_configuration(tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_id is None and tokenizer.eos_id is None
    assert tokenizer.encode("In the beginning") == [0, 886, 266, 2848]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    values = json.loads((TINY / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None}
    values["padding"] |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert len(Tokenizer.load(tmp_path).encode("one two three four five six seven", add_special_tokens=False)) == 7


def test_missing_tokenizer_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value) == (
        f"no tokenizer: {tmp_path / 'tokenizer.json'} does not exist; name a folder that has one with --tokenizer, "
        "or work on token ids only with --skip-tokenizer-init"
    )


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}'])
def test_corrupted_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer file: .*--tokenizer"):
        Tokenizer.load(tmp_path)


def test_corrupted_configuration(tmp_path: Path) -> None:
    folder = copy_without(tmp_path)
    (folder / "tokenizer_config.json").write_text("{'a': 1}")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object, found list"):
        Tokenizer.load(folder)


def test_text_must_be_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="text to encode must be a string, found list"):
        tokenizer.encode([1, 2])  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83E at place 3"):
        tokenizer.encode("ab \ud83e c")
    assert tokenizer.encode("ab \U0001f984 c")


def test_token_bytes_add_up(tokenizer: Tokenizer) -> None:
    text = "Hé, 日本語 🦄 naïve\n\t"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text
    assert tokenizer.token_bytes(3) == b"<|User|>"
