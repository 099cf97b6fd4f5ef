"""HTTP processes as rank 0 starts and watches them, over a fake engine; and the command on a real one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from rorqual.engine.server.config import ServerConfig
from rorqual.launch.serve_processes import HttpProcesses
from rorqual.launch.serve_socket import close_listener, is_open_to_others, open_listener
from tests.server.fake_engine import FakeEngine
from tests.server.serving import wait_ready
from tests.server.soak import numbers_of
from tests.server.started import started

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def processes(engine, counts_folder=None, **settings):
    config = ServerConfig(**{"port": 0, "disable_access_log": True, **settings})
    listener, url = open_listener(config)
    try:
        found = HttpProcesses(config, address=engine.address, descriptor=listener.fileno(), counts_folder=counts_folder)
        found.start()
        try:
            yield found, url
        finally:
            found.stop()
    finally:
        close_listener(listener, config)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_two_processes_share_a_port_and_one_that_dies_is_replaced():
    key = {"Authorization": "Bearer very-secret"}
    with FakeEngine(delay=0.01) as engine, processes(engine, api_server_count=2, api_key=("very-secret",)) as (found, url):
        engine.wait(lambda: len(engine.clients) == 2, "both say hello", 60)
        wait_ready(url)
        first, second = found.pids
        for name in ("cmdline", "environ"):  # where other users and tools look
            assert "very-secret" not in Path(f"/proc/{first}/{name}").read_text()
        for pid in found.pids:  # Slurm and systemd signal every process of a job; rank 0 drains
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for _ in range(4):
            assert httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=key, timeout=20).status_code == 200
        found.look_after()
        assert found.restarts == 0
        os.kill(first, signal.SIGKILL)
        engine.wait(lambda: (found.look_after() or found.restarts) == 1, "it is started again")
        engine.wait(lambda: len(engine.clients) == 3, "the new one says hello", 60)
        assert found.pids[1] == second and found.pids[0] != first
        wait_ready(url)
        pids = found.pids
    assert all(gone(pid) for pid in pids)


def test_one_that_is_hung_is_killed_and_started_again(caplog):
    with FakeEngine() as engine, processes(engine) as (found, url):
        engine.wait(lambda: engine.clients, "it says hello", 60)
        wait_ready(url)
        (first,) = found.pids
        (peer,) = engine.clients
        before = engine.heard[peer]
        engine.wait(lambda: engine.heard[peer] > before + 3.0, "signs of life go on without requests", 15)
        found.replace("http-9", "is nobody here")
        assert not gone(first)
        os.kill(first, signal.SIGSTOP)
        found.replace("http-0", "has given no sign of life")
        engine.wait(lambda: (found.look_after() or found.restarts) == 1, "it is started again")
        wait_ready(url, 60)
        assert found.pids != [first] and httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert f"http-0 (process {first}) is hung: it has given no sign of life; it is killed" in caplog.text


def test_one_that_hangs_before_it_serves(tmp_path, monkeypatch, caplog):
    with FakeEngine() as engine, processes(engine, str(tmp_path)) as (found, url):
        (first,) = found.pids
        os.kill(first, signal.SIGSTOP)
        found.look_after()
        assert found.pids == [first]
        monkeypatch.setattr("rorqual.launch.serve_processes.BEGIN_S", 0.1)
        time.sleep(0.2)
        found.look_after()
        monkeypatch.undo()
        engine.wait(lambda: (found.look_after() or found.restarts) == 1, "it is started again")
        wait_ready(url, 60)
        assert f"http-0 (process {first}) is hung: it has not begun to serve within 0.1 s; it is killed" in caplog.text
        (second,) = found.pids
        monkeypatch.setattr("rorqual.launch.serve_processes.BEGIN_S", 0.1)
        found.look_after()
        time.sleep(0.2)
        found.look_after()
        assert found.pids == [second] and not gone(second) and found.restarts == 1


def test_they_end_with_their_parent():
    """Rank 0 may be killed in any way: its HTTP processes see the end of their standard input."""
    code = (
        "import sys, time\n"
        "from rorqual.engine.server.config import ServerConfig\n"
        "from rorqual.launch.serve_processes import HttpProcesses\n"
        "from rorqual.launch.serve_socket import open_listener\n"
        "config = ServerConfig(port=0)\n"
        "listener, url = open_listener(config)\n"
        "found = HttpProcesses(config, address=sys.argv[1], descriptor=listener.fileno(), counts_folder=None)\n"
        "found.start()\n"
        "print(found.pids[0], flush=True)\n"
        "time.sleep(120)\n"
    )
    with FakeEngine() as engine:
        parent = subprocess.Popen([sys.executable, "-c", code, engine.address], stdout=subprocess.PIPE, text=True)
        try:
            pid = int(parent.stdout.readline())
            engine.wait(lambda: engine.clients, "it says hello", 60)
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
        engine.wait(lambda: gone(pid), "it ends", 20)


def test_one_that_cannot_serve_ends_the_job(tmp_path):
    with FakeEngine() as engine, processes(engine, chat_template=str(tmp_path / "none.jinja")) as (found, url):
        end = time.monotonic() + 60
        with pytest.raises(RuntimeError, match="cannot serve"):
            while time.monotonic() < end:
                found.look_after()
                time.sleep(0.05)


def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "server.sock")
    config = ServerConfig(uds=path)
    listener, url = open_listener(config)
    assert url == f"unix:{path}" and os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="in use"):
        open_listener(config)
    listener.close()  # as a server that was killed: the file stays
    listener, _ = open_listener(config)
    close_listener(listener, config)
    assert not os.path.exists(path)
    Path(path).write_text("not a socket")
    with pytest.raises(ValueError, match="no socket"):
        open_listener(config)


def test_a_port_in_use_is_told_with_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
            open_listener(ServerConfig(port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("host", "others"), [("127.0.0.1", False), ("127.3.4.5", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)]
)
def test_who_can_reach_an_address(host, others):
    assert is_open_to_others(ServerConfig(host=host)) is others
    assert not is_open_to_others(ServerConfig(host=host, uds="/tmp/x"))


def test_the_default_address_is_loopback():
    assert ServerConfig().host == "127.0.0.1"


def test_the_command_replaces_its_only_http_process_when_it_is_hung():
    flags = ["tiny", "--dtype", "float32", "--max-total-tokens", "4096", "--max-model-len", "2048", "--http-process-timeout", "6"]
    with started(flags) as (url, server, lines), ThreadPoolExecutor(1) as pool:
        (hung,) = [p for p in psutil.Process(server.pid).children(recursive=True) if p.cmdline()[-1] == "rorqual.engine.server"]
        body = {"prompt": "The whale", "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}
        lost = pool.submit(read_until_it_breaks, url, body)
        while not lost.running():
            time.sleep(0.01)
        end = time.monotonic() + 60
        while numbers_of(url).get("num_requests_running") != 1:
            assert time.monotonic() < end
            time.sleep(0.05)
        hung.suspend()
        while hung.is_running() and hung.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "".join(lines)
            time.sleep(0.1)
        assert "[DONE]" not in lost.result(30)
        wait_ready(url, 60)
        while any(numbers_of(url).values()):
            assert time.monotonic() < end, "its request still runs"
            time.sleep(0.2)
        httpx.post(url + "/flush_cache", timeout=60).raise_for_status()
        answer = httpx.post(url + "/v1/completions", json={"prompt": "The whale", "max_tokens": 6, "temperature": 0}, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 6
    log = "".join(lines)
    assert "http-0 has given no sign of life for 6 s; its 1 open completions are aborted" in log
    assert f"http-0 (process {hung.pid}) is hung: it has given no sign of life for 6 s; it is killed" in log


def read_until_it_breaks(url, body):
    text = ""
    with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url + "/v1/completions", json=body, timeout=90) as answer:
        for part in answer.iter_text():
            text += part
    return text


def test_the_command_serves_the_embedded_model():
    with started(["tiny", "--dtype", "float32", "--max-total-tokens", "4096"]) as (url, _, lines):
        assert url.startswith("http://127.0.0.1:")
        answer = httpx.post(url + "/v1/completions", json={"prompt": "The whale", "max_tokens": 6, "temperature": 0}, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 6 and answer["choices"][0]["text"]
    assert "ending" in "".join(lines) and "Traceback" not in "".join(lines)
