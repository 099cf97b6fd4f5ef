"""What users send by mistake or on purpose, and what a killed rank 0 leaves behind."""

import os
import subprocess
import sys
import threading
import time

import pytest

from rorqual.engine.text.tokenizer import LONG, Tokenizer
from tests.server.fake_engine import TINY, FakeEngine


@pytest.mark.parametrize("key", ["--5", "", "-1", "1_0", " 3", "\u00b3", "\uff11", "9" * 5000, "1e3", "x"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_keys_of_logit_bias_that_are_no_tokens(served, path, key):
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    with served.http() as client:
        answer = client.post(path, json={**body, "logit_bias": {key: 1}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias"


def test_a_token_with_two_biases(served):
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "logit_bias": {"10": 100, "010": -100}})
    assert answer.status_code == 400 and "twice" in answer.json()["error"]["message"]


def test_too_many_prompts_are_refused_before_they_are_tokenised(served, monkeypatch):
    def never(*args, **more):
        raise AssertionError("a prompt was tokenised")

    monkeypatch.setattr(served.process.state.texts.tokenizer, "encode", never)
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": ["ab"] * 5000})
    assert answer.status_code == 400 and "--max-completions" in answer.json()["error"]["message"]


def test_long_texts_become_the_same_tokens_and_the_same_text(served):
    tokenizer = Tokenizer.load(TINY)
    text = "The wh\u00e4le \U0001f40b sang.\n<|User|> " * 2000
    assert len(text) > LONG
    ids = tokenizer._backend.encode(text, add_special_tokens=True).ids
    assert tokenizer.encode(text) == ids and len(ids) > LONG
    with served.http() as client:
        assert client.post("/tokenize", json={"prompt": text}).json()["tokens"] == ids
        assert client.post("/detokenize", json={"tokens": ids[1:]}).json()["prompt"] == text


def test_other_threads_run_while_a_long_text_is_tokenised():
    tokenizer = Tokenizer.load(TINY)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (tokenizer.encode("ab " * 200_000), done.set()))
    thread.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 5  # with the lock held all the time: one or two


def test_a_killed_rank_0_leaves_no_folder_behind():
    code = (
        "import os, sys, time\n"
        "from rorqual.engine.server.config import ServerConfig\n"
        "from rorqual.launch.serve_processes import HttpProcesses\n"
        "from rorqual.launch.serve_socket import open_listener\n"
        "listener, url = open_listener(ServerConfig(port=0))\n"
        "folder = os.path.dirname(sys.argv[1].removeprefix('ipc://'))\n"
        "found = HttpProcesses(ServerConfig(port=0), address=sys.argv[1], descriptor=listener.fileno(), counts_folder=folder)\n"
        "found.start()\n"
        "print(found.pids[0], flush=True)\n"
        "time.sleep(120)\n"
    )
    with FakeEngine() as engine:
        folder = os.path.dirname(engine.address.removeprefix("ipc://"))
        parent = subprocess.Popen([sys.executable, "-c", code, engine.address], stdout=subprocess.PIPE, text=True)
        try:
            assert int(parent.stdout.readline()) > 0
            engine.wait(lambda: engine.clients, "it says hello", 60)
            assert os.path.isdir(folder)
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
        engine.wait(lambda: not os.path.exists(folder), "the folder goes", 30)
