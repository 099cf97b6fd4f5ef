"""Every shell command of the README runs here, on CPU ranks and the embedded model, or is named below with why it cannot."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rorqual.launch.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELLS = ("rorqual", "torchrun", "pip", "make", "curl")
NOT_HERE = {
    "pip install": "installs into the environment that runs this; the wheel is built by tests/test_packaging.py",
    "--device cuda": "needs a GPU",
    "v3.2-slice": "needs a GPU",
    "bench kernels": "needs a GPU",
}


def commands() -> list[str]:
    """Of all blocks without a language, one line each, without comments."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            if line.split(" ")[0] in SHELLS:
                found.append(re.sub(r"\s+# .*", "", line).strip())
    return found


def reason(command: str) -> str | None:
    return next((why for words, why in NOT_HERE.items() if words in command), None)


HERE = [command for command in commands() if reason(command) is None]
SERVED = [command for command in HERE if "serve tiny" in command or command.startswith("curl")]  # one serves, the others ask it
EPLB = [command for command in HERE if command.startswith("rorqual eplb")]  # each reads what the one before wrote
ALONE = [command for command in HERE if command not in SERVED + EPLB]
#: what is made smaller, or put in for a name that stands for the reader's own
SMALLER = {
    "MODEL": "tiny --dtype float32 --max-tokens 4 --max-total-tokens 2048",
    '"..."': '"Emma was"',
    "--kv-host-memory 96": "--kv-host-memory 0.2 --prompt 'Emma was'",
    "--num-redundant-experts 32": "--num-redundant-experts 8 --prompt 'Emma was'",
    "--steps 400 --tokens 16384": "--steps 12 --tokens 2048",
}
PLACES = {"rorqual": ["-m", "rorqual.launch"], "torchrun": ["-m", "torch.distributed.run"]}


def words_of(command: str, port: int = 8000) -> list[str]:
    for shown, used in SMALLER.items():
        command = re.sub(rf"(?<!\S){re.escape(shown)}(?!\S)", lambda _, used=used: used, command)
    first, *rest = shlex.split(command.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}"))
    return [sys.executable, *PLACES[first], *rest] if first in PLACES else [first, *rest]


def run(command: str, folder: Path, port: int = 8000) -> str:
    ran = subprocess.run(words_of(command, port), cwd=folder, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def test_every_command_is_known() -> None:
    assert len(HERE) >= 12 and len(SERVED) == 3 and len(EPLB) == 4, commands()
    for command in commands():
        if command.startswith("rorqual"):
            assert any(command.split()[1 : 1 + len(name.split())] == name.split() for name in COMMANDS), command


@pytest.mark.parametrize("command", ALONE)
def test_it_runs(command: str, tmp_path: Path) -> None:
    if command.startswith("make"):
        if Path(sys.prefix) != ROOT / ".venv":
            pytest.skip("make would set up a virtual environment of its own")
        out = subprocess.run(["make", "-s", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=250)
        assert out.returncode == 0 and "the server has ended in good order" in out.stdout, out.stdout[-2000:] + out.stderr[-4000:]
        return
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    several = example.replace('dtype="float32"', 'dtype="float32", data_parallel_size=2, tensor_parallel_size=2, max_total_tokens=2048')
    (tmp_path / "script.py").write_text(several, encoding="utf-8")
    assert run(command, tmp_path)


@pytest.fixture(scope="module")
def served() -> Iterator[int]:
    """The port of the server that the README starts."""
    pytest.importorskip("fastapi", reason="the server needs pip install 'rorqual[serve]'")
    from tests.server.started import started

    (command,) = [command for command in SERVED if command.startswith("rorqual serve")]
    with started([*shlex.split(command)[2:], "--max-total-tokens", "4096"]) as (url, _, _):
        yield int(url.rsplit(":", 1)[1])


@pytest.mark.parametrize("command", [command for command in SERVED if not command.startswith("rorqual serve")])
def test_the_server_is_asked(command: str, served: int, tmp_path: Path) -> None:
    out = run(command, tmp_path, served)
    assert ("seven" if command.startswith("curl") else "Successful requests") in out, out


def test_a_balance_is_planned(tmp_path: Path) -> None:
    for command in EPLB:
        run(command, tmp_path)
    assert (tmp_path / "eplb.html").stat().st_size > 10_000
