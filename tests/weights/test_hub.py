from __future__ import annotations

from pathlib import Path

import pytest

from rorqual.engine.weights.hub import resolve_model
from tests.checkpoints import TINY


def test_tiny_is_the_embedded_model() -> None:
    found = resolve_model("tiny")
    assert found.resolve() == TINY.resolve()
    for name in ("config.json", "tokenizer.json", "README.md", "eval/reference.json", "model.safetensors.index.json"):
        assert (found / name).is_file()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./tiny") == Path("tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/tiny") == tmp_path / "tiny"


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model given; give a folder, a Hugging Face hub id, or 'tiny' for the embedded model"):
        resolve_model("")
    with pytest.raises(ValueError, match="model folder '/no/such/place' does not exist; give a folder"):
        resolve_model("/no/such/place")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; give the folder of a Hugging Face checkpoint"):
        resolve_model(str(file))


def test_hub_failures_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def refuse(name: str, **kwargs: object) -> str:
        asked.append((name, kwargs["revision"]))
        raise OSError("Connection refused\nmore text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    message = r"'org/name' is neither a folder nor to be had from the Hugging Face hub \(OSError: Connection refused\); check the name"
    with pytest.raises(ValueError, match=message):
        resolve_model("org/name", revision="v1")
    assert asked == [("org/name", "v1")]


def test_hub_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], revision: None) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == resolve_model("org/name", weights=False) == tmp_path
    assert "*.safetensors" in asked[0] and "*.safetensors" not in asked[1] and "*.json" in asked[1]
