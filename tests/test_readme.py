"""What the README shows works: its example runs, its flags and targets exist."""

import re
from pathlib import Path

import pytest

from rorqual.launch import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs_and_answers(capsys):
    example, _ = EXAMPLES
    exec(compile(example, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "Emma was ->  a little, and she was a very pretty girl" in out
    assert out.rstrip().endswith("Three plus four is seven.")


def test_the_client_example_streams_from_a_server(capsys):
    pytest.importorskip("openai", reason="OpenAI's client is not installed")
    pytest.importorskip("fastapi", reason="the server needs pip install 'rorqual[serve]'")
    from tests.server.fake_engine import FakeEngine
    from tests.server.serving import serving

    _, example = EXAMPLES
    assert example.count("http://127.0.0.1:8000") == 1
    with serving(FakeEngine(script=lambda submit, index: " a little."), served_model_name=("tiny",)) as served:
        exec(compile(example.replace("http://127.0.0.1:8000", served.url), "README.md", "exec"), {})
    assert capsys.readouterr().out == " a little."


def test_every_flag_exists(capsys):
    helps = []
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([*name.split(), "--help"])
        helps.append(capsys.readouterr().out)
    known = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", " ".join(helps)))
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*|(?<![\w-])-(?:tp|pp|dp|ep)\b", README))
    assert shown - known == set(), "the README shows flags that do not exist"


def test_every_make_target_and_link_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`make ([a-z]+)`|^make ([a-z]+)$", README, re.MULTILINE)
    assert {"demo", "test", "lint", "bench"} == {a or b for a, b in targets}
    for target in ("demo", "test", "lint", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
