"""The life of a server: loading, ready, draining, gone."""

import subprocess
import sys
import threading
import time

import httpx
import pytest

import rorqual
from rorqual.engine.serving import wire
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_ready


def test_while_the_model_is_loaded(tmp_path):
    late = FakeEngine(address=f"ipc://{tmp_path}/engine.sock")
    nobody = FakeEngine(address=f"ipc://{tmp_path}/other.sock")
    nobody.address = late.address
    with serving(_NotYet(late.address), wait=False) as served:
        end = time.monotonic() + 20
        while True:
            try:
                answer = httpx.get(served.url + "/health", timeout=5)
                break
            except httpx.HTTPError:
                assert time.monotonic() < end
                time.sleep(0.05)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading" and answer.headers["retry-after"] == "10"
        with served.http() as client:
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
            assert client.get("/v1/models").status_code == 503
            assert client.get("/metrics").status_code == 200 and client.get("/version").status_code == 200
            assert client.post("/abort", json={"abort_all": True}).status_code == 503
            with late:
                wait_ready(served.url)
                assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
                about = client.get("/version").json()
                assert set(about) == {"version", "layout", "device"} and about["device"] == "cpu"


class _NotYet:
    """An address where nobody is."""

    def __init__(self, address):
        self.address = address

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_draining_refuses_new_requests_and_finishes_open_ones():
    with serving(FakeEngine(delay=0.03)) as served:
        results = []
        thread = threading.Thread(
            target=lambda: results.append(served.openai().completions.create(model="tiny", prompt="x", max_tokens=30))
        )
        thread.start()
        served.engine.wait(lambda: served.engine.open == 1, "it runs")
        served.engine.say(wire.Goodbye(phase="drain", reason="SIGTERM"))
        with served.http() as client:
            end = time.monotonic() + 10
            while client.get("/health").status_code != 503:
                assert time.monotonic() < end
                time.sleep(0.01)
            answer = client.post("/v1/completions", json={"prompt": "y"})
            assert answer.status_code == 503 and "SIGTERM" in answer.text and "retry-after" in answer.headers
            assert client.get("/v1/models").status_code == 200
        thread.join(20)
        assert results[0].usage.completion_tokens == 30
        served.engine.say(wire.Goodbye(phase="end", reason="SIGTERM"))
        served.engine.wait(lambda: served.process.server.should_exit, "the process ends")
        assert served.process.code == 0


@pytest.mark.parametrize("said", [False, True])
def test_an_engine_that_dies_takes_its_http_process_with_it(said):
    with serving(FakeEngine(delay=0.05)) as served:
        results = []

        def ask(stream):
            body = {"prompt": "x", "max_tokens": 500, "stream": stream}
            with httpx.Client(base_url=served.url, timeout=20) as client:
                results.append((stream, client.post("/v1/completions", json=body)))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        served.engine.wait(lambda: served.engine.open == 2, "both run")
        time.sleep(0.3)
        if said:
            served.engine.say(wire.Goodbye(phase="end", reason="RuntimeError: a rank is gone"))
            time.sleep(0.2)
        served.engine.stop()
        for thread in threads:
            thread.join(20)
        whole, streamed = (next(r for s, r in results if s is stream) for stream in (False, True))
        assert whole.status_code == 503 and "engine is gone" in whole.json()["error"]["message"]
        assert streamed.status_code == 200 and "engine is gone" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        if said:
            assert "a rank is gone" in whole.text
        end = time.monotonic() + 10
        while not served.process.server.should_exit:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_an_engine_of_another_version():
    class Other(FakeEngine):
        def welcome(self):
            import msgspec

            return msgspec.structs.replace(super().welcome(), version="9.9.9")

    with serving(Other(), wait=False) as served:
        end = time.monotonic() + 20
        while not served.process.server.should_exit:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert "9.9.9" in served.process.state.client.lost and rorqual.__version__ in served.process.state.client.lost
        assert served.process.code == 1


def test_an_http_process_imports_neither_torch_nor_numpy():
    code = (
        "import sys\n"
        "from rorqual.engine.server import process, app, start, __main__\n"
        "from rorqual.engine.server.openai import chat, completions\n"
        "from rorqual.engine.server import dashboard, metrics, schema, protocol\n"
        "import rorqual.engine.server.structured\n"
        "print([m for m in ('torch', 'numpy', 'xgrammar', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_ids_only():
    """--skip-tokenizer-init: ids in, ids out."""
    with serving(FakeEngine(folder=None)) as served, served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": [10, 11], "max_tokens": 4, "logprobs": 1})
        choice = answer.json()["choices"][0]
        assert choice["text"] == "" and choice["token_ids"] == served.engine.expected_ids([10, 11], 4)
        assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [9]}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400 and "tokenizer" in refused.json()["error"]["message"]
        assert client.get("/health_generate").status_code == 200


def test_the_access_log_leaves_out_probes_that_went_well():
    import logging

    from rorqual.engine.server.__main__ import is_worth_a_line

    def line(method, path, status):
        arguments = ("127.0.0.1:1", method, path, "1.1", status)
        return is_worth_a_line(logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None))

    assert not line("GET", "/health", 200) and not line("GET", "/dashboard.json?since=3", 200)
    assert line("GET", "/health", 503) and line("POST", "/v1/completions", 200)


def test_web_origins():
    with serving(FakeEngine(), allowed_origins=("https://a.example",), api_key=("k",)) as served, served.http() as client:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = client.options("/v1/completions", headers=asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        assert client.options("/v1/completions", headers={**asked, "Origin": "https://b.example"}).status_code == 400
