"""Jobs of two hosts that are started wrongly, and what is said: one rank a host, ``rorqual serve`` over two replicas.

python -m tests.launch.nodes.wrong_starts [NAME ...]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts import Host, Hosts, Running, at_start, why_not

TINY = Path(__file__).resolve().parents[3] / "launch" / "tiny"


@dataclass(kw_only=True)
class Wrong:
    """One wrong start. ``alpha`` and ``beta`` are flags and environment that a host adds or, by naming them, replaces."""

    said: tuple[str, ...]  # what every host that is started says; {a} and {b} are their addresses
    alpha: dict[str, str | None] = field(default_factory=dict)  # flag -> value; None leaves the flag out
    beta: dict[str, str | None] = field(default_factory=dict)
    alone: int | None = None  # start this host only
    code: str | None = None  # what Python on beta runs first
    before: Callable[[Host, Path], list[Running]] | None = None  # runs on alpha first


def hold_port(host: Host, folder: Path) -> list[Running]:
    """Something else listens at the meeting's port."""
    running = host.start([sys.executable, "-m", "http.server", "29500", "--bind", host.address])
    time.sleep(2.0)
    return [running]


def other_files(host: Host, folder: Path) -> list[Running]:
    """A model that has the same name and shape, but another configuration."""
    shutil.copytree(TINY, folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), encoding="utf-8")
    return []


WRONG = {
    "address of nobody": Wrong(
        alone=1, beta={"--master-addr": "10.99.0.1"}, said=("node 0 does not answer at 10.99.0.1:29500", "unreachable")
    ),
    "address of a silent host": Wrong(alone=1, said=("node 0 does not answer at {a}:29500", "nothing listens at that port")),
    "address of another host": Wrong(
        alone=0,
        alpha={"--master-addr": "{b}"},
        said=("node 0's store, where the ranks meet, cannot listen on {b}:29500", "it has {a} (eth0)"),
    ),
    "name of nobody": Wrong(alone=1, beta={"--master-addr": "no-such.invalid"}, said=("'no-such.invalid' is no address and no name",)),
    "port in use": Wrong(alone=0, before=hold_port, said=("cannot listen on {a}:29500: the port is in use by process", "http.server")),
    "node that does not come": Wrong(alone=0, said=("node(s) 1 of 2 did not come to {a}:29500 within",)),
    "other version": Wrong(
        code="import rorqual\nrorqual.__version__ = '0.0.1'\n",
        said=("rorqual is", "on node 0 (alpha ({a})) and 0.0.1 on node 1 (beta ({b}))"),
    ),
    "other settings": Wrong(
        beta={"--page-size": "16"}, said=("not started alike: page_size is 64 on alpha ({a}) (ranks 0), 16 on beta ({b}) (ranks 1)",)
    ),
    "other layout": Wrong(
        beta={"--dp-size": "1", "--tp-size": "2"}, said=("tensor_parallel_size is 1 on alpha ({a}) (ranks 0), 2 on beta",)
    ),
    "other files": Wrong(before=other_files, beta={"MODEL": "{folder}/model"}, said=("digest of the model's files is",)),
    "clock off": Wrong(
        code="import time\n_real = time.time\ntime.time = lambda: _real() - 120.0\n",
        said=("the clock of beta ({b}) is 120.0 s behind alpha ({a}); at most 10 s",),
    ),
    "wrong flag on one host": Wrong(beta={"--max-model-len": "9999999"}, said=("max_model_len 9999999 is more than the model's",)),
}


def start(hosts: Hosts, number: int, given: dict[str, str | None], timeout_s: float, env: dict[str, str] | None) -> Running:
    """``rorqual serve`` on one of two hosts, with what is ``given`` in the place of what is right."""
    flags: dict[str, str | None] = {
        "--dp-size": "2", "--dtype": "float32", "--max-total-tokens": "4096", "--dist-timeout": "60", "--nnodes": "2",
        "--node-rank": str(number), "--master-addr": hosts[0].address, "--node-timeout": f"{timeout_s:g}", **given,
    }  # fmt: skip
    model = flags.pop("MODEL", None) or "tiny"
    return hosts[number].rorqual(
        "serve", model, *(word for flag, value in flags.items() if value is not None for word in (flag, value)), env=env
    )


def run(name: str, hosts: Hosts, folder: Path) -> list[Running]:
    """Start it, and wait until all has ended. AssertionError if a host ends well, late, or without the words."""
    wrong = WRONG[name]
    first = wrong.before(hosts[0], folder) if wrong.before else []
    places = {"a": hosts[0].address, "b": hosts[1].address, "folder": str(folder)}
    running = []
    for number, more in enumerate((wrong.alpha, wrong.beta)):
        if wrong.alone in (None, number):
            env = at_start(folder / "site", wrong.code) if wrong.code and number == 1 else None
            given = {flag: value and value.format(**places) for flag, value in more.items()}
            running.append(start(hosts, number, given, timeout_s=6.0 if wrong.alone is not None else 60.0, env=env))
    for process in running:
        code = process.wait(120)
        assert code != 0, (name, process.text)
        for words in wrong.said:
            assert words.format(**places) in process.text, (name, words.format(**places), process.text)
        assert "Traceback" not in process.text, (name, process.text)
    for process in first:
        process.process.kill()
        process.process.wait(20)
    return running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WRONG))
    reason = why_not()
    if reason:
        print(f"cannot run here: {reason}")
        return 1
    bad = 0
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory(prefix="rorqual-wrong-") as folder, Hosts(2) as hosts:
            begin = time.monotonic()
            try:
                running = run(name, hosts, Path(folder))
                line = next(line for line in running[-1].text.splitlines() if "error" in line)
                print(f"{name}: {time.monotonic() - begin:.1f} s: {line}", flush=True)
            except AssertionError as error:
                bad += 1
                print(f"{name}: FAILED: {error}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
