"""Users' errors: one line, exit code 2, before anything expensive; bugs keep their traceback."""

import subprocess
import sys

import pytest

from rorqual.launch import cli, errors, generate
from tests.launch.fakes import FakeLLM, fake_open


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    def refuse(*_):
        raise AssertionError("an engine was made")

    monkeypatch.setattr(generate, "open_llm", refuse)
    monkeypatch.delenv("RORQUAL_DEBUG", raising=False)


def error_of(capsys, *words: str) -> str:
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    assert err.startswith("rorqual: error: ")
    return err.removeprefix("rorqual: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "unknown command 'train'; known are: generate, serve, router, inspect, plan, doctor, bench throughput, bench latency"),
        (["bench"], "'bench' needs the name of what to run; known are: bench throughput, bench latency"),
        (["bench", "speed"], "unknown command 'bench speed'; known are: bench throughput, bench latency"),
        (["generate"], "no model; give a folder, a hub id or 'tiny' as the first argument (before --prompt)"),
        (["bench", "latency", "a", "--model", "b"], "two models were named: 'a' and --model 'b'; give one"),
        (["bench", "throughput", "a", "--model", "b"], "two models were named: 'a' and --model 'b'; give one"),
        (["generate", "a", "--model", "b", "--prompt", "x"], "two models were named: 'a' and --model 'b'; give one"),
        (["generate", "m"], "no prompt; give --prompt TEXT or --prompts-file FILE"),
        (["generate", "m", "--frobnicate"], "unrecognized arguments: --frobnicate (see `rorqual generate --help`)"),
        (["generate", "m", "--prompt", "x", "--top-p", "0"], "top_p must be a number above 0 and at most 1, found 0.0"),
        (["generate", "m", "--prompts-file", "/nowhere/p.jsonl"], "/nowhere/p.jsonl: No such file or directory"),
        (["generate", "m", "--prompt", "x", "--output", "/nowhere/o"], "--output /nowhere/o cannot be written: No such file or directory"),
        (["generate", "m", "--prompt", "x", "--output", "/"], "--output / cannot be written: Is a directory"),
        (["generate", "m", "--config", "/nowhere/c.json"], "/nowhere/c.json: No such file or directory"),
        (["inspect", "tiny", "--tp-size", "3"], "num_attention_heads 8 does not divide over 3 ranks; valid: [1, 2, 4, 8]"),
        (["inspect", "tiny", "--page-size", "0"], "page_size 0 is not a power of two from 1 to 256"),
        (["bench", "throughput", "--runs", "0"], "--runs must be at least 1, found 0"),
        (["bench", "throughput", "--num-warmups", "-1"], "--warmup-requests must be at least 0, found -1"),
        (["bench", "throughput", "--threads", "0"], "--threads must be at least 1, found 0"),
        (["bench", "serve", "--num-warmups", "-1"], "--num-warmups must be at least 0, found -1"),
        (["bench", "serve", "--probe-request-rate", "-0.5"], "--probe-request-rate must be at least 0, found -0.5"),
        (["bench", "report", "/nowhere/r.json"], "/nowhere/r.json: No such file or directory"),
    ],
)
def test_messages(capsys, words, message):
    assert error_of(capsys, *words).startswith(message)


def test_checking_an_output_file_leaves_nothing_behind(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    generate.check_writable(str(new))
    generate.check_writable(str(old))
    assert not new.exists() and old.read_text() == "kept"


def test_debugging_adds_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    assert cli.main(["generate", "m"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and err.rstrip().splitlines()[-1].startswith("rorqual: error: no prompt")


def test_another_rank_waits_before_it_speaks_and_says_who_it_is(capsys, monkeypatch):
    waited = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    assert cli.main(["generate", "m"]) == 2
    assert waited == [errors.PATIENCE_S]
    assert capsys.readouterr().err.startswith("rorqual: error (rank 3): no prompt")


def test_bugs_are_not_hidden(monkeypatch):
    class Broken(FakeLLM):
        def generate_stream(self, prompts, params):
            raise RuntimeError("a bug")

    monkeypatch.setattr(generate, "open_llm", fake_open(Broken()))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["generate", "m", "--prompt", "x"])


def test_debugging_shows_where_a_value_error_of_our_own_came_from(capsys, monkeypatch):
    class Broken(FakeLLM):
        def generate_stream(self, prompts, params):
            raise ValueError("looks like a user's error")

    monkeypatch.setattr(generate, "open_llm", fake_open(Broken()))
    monkeypatch.delenv("RORQUAL_DEBUG", raising=False)
    assert cli.main(["generate", "m", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "rorqual: error: looks like a user's error\n"
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    assert cli.main(["generate", "m", "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "in generate_stream" in err and err.rstrip().endswith("looks like a user's error")


def test_messages_of_several_lines_become_one():
    assert errors.describe(ValueError("a\n  b")) == "a b"
    assert errors.describe(ValueError()) == "ValueError"
    assert errors.describe(OSError("disk gone")) == "disk gone"


def test_the_module_prints_help_and_help_without_arguments():
    def run(*words):
        return subprocess.run([sys.executable, "-m", "rorqual.launch", *words], capture_output=True, text=True, timeout=120)

    bare = run()
    assert bare.returncode == 0 and bare.stderr == ""
    for name in cli.COMMANDS:
        assert f"  {name}  " in bare.stdout or f"  {name} " in bare.stdout
    bad = run("nothing")
    assert bad.returncode == 2 and bad.stderr.startswith("rorqual: error: unknown command 'nothing'") and bad.stderr.count("\n") == 1


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*name.split(), "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rorqual {name}")
