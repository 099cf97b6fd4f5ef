"""Commands under torchrun: one voice, one result, one end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.launch import cli, generate
from tests.ranks import collect_ranks

WORDS = ["--dtype", "float32", "--max-tokens", "4", "--max-model-len", "128", "--max-total-tokens", "1024", "--disable-log-stats"]
PROMPTS = ["--prompt", "In the beginning", "Emma was", "My dear Sir, I am"]


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(ranks), "-m", "rorqual.launch"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=240, env=env)


def rows(text: str) -> list[dict]:
    found = [json.loads(line) for line in text.splitlines()]
    for row in found:
        del row["timings"]
    return found


def test_two_ranks_print_what_one_prints(capsys):
    assert cli.main(["generate", "tiny", *PROMPTS, *WORDS, "--json"]) == 0
    alone = rows(capsys.readouterr().out)
    assert [r["usage"]["completion_tokens"] for r in alone] == [4, 4, 4]
    run = torchrun(2, "generate", "tiny", *PROMPTS, *WORDS, "--json", "--dp-size", "2")
    assert run.returncode == 0, run.stderr
    assert rows(run.stdout) == alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp-size", "3"], "pp=1 x dp=1 x tp=3 makes 3 ranks, but the job has 2"),
        (["--dp-size", "2", "--prompt", "word " * 300], "128"),
    ],
)
def test_an_error_that_all_ranks_share_is_told_once(words, message):
    run = torchrun(2, "generate", "tiny", *PROMPTS, *WORDS, *words)
    told = [line for line in run.stderr.splitlines() if line.startswith("rorqual: error")]
    assert run.returncode != 0
    assert len(told) == 1 and message in told[0] and "(rank" not in told[0], run.stderr
    assert "rorqual/launch" not in run.stderr and "failed first" not in run.stderr


def generate_with_a_bug_on_rank_1() -> int:
    if os.environ["RANK"] == "1":

        def broken(*_):
            raise RuntimeError("a bug of one rank")

        generate.engine_prompts = broken
    return cli.main(["generate", "tiny", *PROMPTS, *WORDS, "--dp-size", "2"])


def test_a_bug_on_one_rank_ends_all_and_is_named():
    exits = collect_ranks(generate_with_a_bug_on_rank_1, 2, timeout=60)
    assert "a bug of one rank" in exits[1].error
    assert exits[0].code == 1 and exits[0].seconds < 45
    assert "stopping because rank 1 failed first" in exits[0].stderr and "a bug of one rank" in exits[0].stderr
