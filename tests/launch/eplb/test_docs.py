"""docs/eplb.md shows what works: its example runs, its commands, flags and formats exist."""

import re
from pathlib import Path

import pytest

from rorqual.launch import cli
from rorqual.moe.eplb import tools
from rorqual.moe.eplb.formats import FORMATS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "eplb.md").read_text(encoding="utf-8")


def test_the_python_examples_run(capsys):
    for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(example, "docs/eplb.md", "exec"), {})
    out = capsys.readouterr().out
    assert "(8, 72)" in out and "experts move" in out and "live" in out


def test_every_command_and_flag_exists(capsys):
    helps = []
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([*name.split(), "--help"])
        helps.append(capsys.readouterr().out)
        assert not name.startswith("eplb ") or re.search(rf"^\| `{name.split()[1]}[ `]", TEXT, re.MULTILINE), name
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", " ".join(helps)))
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", TEXT))
    assert shown - known <= {"--nproc-per-node", "--kills", "--cycles"}, (
        "torchrun's and a proof's flag apart, docs/eplb.md shows flags that do not exist"
    )


def test_every_command_that_is_shown_parses():
    lines = re.findall(r"^\$? ?rorqual (eplb .*)$", TEXT, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        words = line.split("#")[0].split()
        cli.parse(" ".join(words[:2]), words[2:])


def test_every_format_and_public_name_is_told():
    for one in FORMATS:
        assert f"`{one.name}`" in TEXT, one.name
    for name in tools.__all__:
        assert callable(getattr(tools, name)) or getattr(tools, name)
        assert f"`{name}" in TEXT or f" {name}" in TEXT, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'; its names are: CostModel"):
        getattr(tools, "nothing")  # noqa: B009
