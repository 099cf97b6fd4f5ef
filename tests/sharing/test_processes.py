"""Engines in processes of their own, one of which is killed, and replicas of one engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rorqual import LLM
from tests.checkpoints import checkpoint
from tests.offload.engines import alone, counters, params
from tests.ranks import run_ranks
from tests.sharing.engines import LONG, SOME, cached, expect_whole, expected, share_of, shared, tokens
from tests.sharing.process import be_patient


class Other:
    """An engine in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.sharing.process", str(folder), str(checkpoint("v32"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, prompt: list[int]) -> None:
        self.process.stdin.write(json.dumps(prompt) + "\n")

    def next(self):
        """What it says next; a process that ended says nothing."""
        line = self.process.stdout.readline()
        assert line, f"the other engine has ended with {self.process.wait()}"
        return json.loads(line)

    def result(self):
        while not isinstance(found := self.next(), list):
            pass
        return found

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(60) == 0


def test_an_engine_is_killed_while_another_works(tmp_path):
    """What it had published stays; what it held comes back when its lease has ended."""
    other = Other(tmp_path)
    assert other.next() == "begun"
    with shared(tmp_path) as llm:
        other.ask(LONG)
        assert other.result() == [alone(11), 0]
        stream = llm.generate_stream(SOME, params())
        got: dict[int, list[int]] = {}
        other.ask(LONG[::-1])
        while other.next() != "token":  # it is in the middle of it
            pass
        os.kill(other.process.pid, signal.SIGKILL)
        for chunk in stream:
            got.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)
        assert [got[i] for i in range(len(SOME))] == expected()
        assert other.process.wait(10) == -signal.SIGKILL
        assert share_of(llm).imported > 0
        end = time.monotonic() + 20
        while share_of(llm).directory.usage().members > 1:
            assert time.monotonic() < end, "a dead member is never taken apart"
            time.sleep(0.05)
        assert cached(llm, LONG) == (len(LONG) - 1) // 4 * 4
        expect_whole(llm)


def test_processes_started_separately(tmp_path):
    other = Other(tmp_path)
    with shared(tmp_path) as llm:
        assert tokens(llm) == expected()
        assert share_of(llm).flush()
        assert other.next() == "begun"
        other.ask(LONG)
        assert other.result() == [alone(11), (len(LONG) - 1) // 4 * 4]
    other.ask(SOME[2])  # the one that computed it has ended
    assert other.result() == [alone(9), (len(SOME[2]) - 1) // 4 * 4]
    other.close()


TP, DP = "tensor_parallel_size", "data_parallel_size"


@pytest.mark.parametrize("args", [{DP: 2, TP: 2}], ids=str)
def test_replicas_find_each_others_prefixes(args, tmp_path):
    settings = {
        **args, "kv_offload": "hybrid", "kv_host_backing": "shm", "kv_host_path": str(tmp_path), "kv_prefix_directory": True,
        "kv_host_memory": 0.05, "kv_device_tokens": 160, "max_total_tokens": 240, "page_size": 4, "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
    }  # fmt: skip
    world = args[DP] * args.get(TP, 1)
    job = (str(checkpoint("v32")), settings, SOME)
    found = run_ranks(replicas_in_turn, world, *job, timeout=240.0, env={"RORQUAL_DEBUG": "1"})
    assert found[0][0] == found[0][1] == expected()
    assert found[0][2] == [(len(prompt) - 1) // 4 * 4 for prompt in SOME]
    assert not list(tmp_path.iterdir()), "something is left of a pool that is gone"


def replicas_in_turn(folder, settings, prompts):
    """Tokens of two rounds, between which prompts change their replicas, and what was cached in the second."""
    be_patient()
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", disable_log_stats=True, **settings) as llm:
        rounds, cached = [], []
        for turn in range(2):
            outputs = []
            for prompt in prompts:  # the router takes turns among replicas without work
                outputs += llm.generate([prompt], params(), use_tqdm=False)
            rounds.append([o.outputs[0].token_ids for o in outputs])
            cached = [o.metrics.cached_tokens for o in outputs]
            if llm.engine.leader is not None:
                assert llm.engine.leader.scheduler.share.flush()
            if turn == 0:
                llm.generate([prompts[0]], params(1), use_tqdm=False)  # so that the second round begins with the other replica
        assert counters(llm)["unwritten"] == 0
        ranks = llm.stats().get("ranks", ())
        assert not ranks or sum(row["scheduler"]["directory"]["imported_pages"] for row in ranks if "scheduler" in row) > 0
        if llm.engine.leader is not None:
            llm.engine.leader.scheduler.share.directory.check()
        return rounds[0] if rounds else [], rounds[1] if rounds else [], cached
