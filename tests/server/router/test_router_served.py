"""``rorqual router`` as a process, in front of two rorqual servers, driven by the official client."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_ready

LIMIT_S = 30


@contextmanager
def router(*flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    command = [sys.executable, "-m", "rorqual.launch", "router", "--port", "0", "--health-interval", "0.2", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"listening at (http://\S+)", line):
                break
        else:
            raise AssertionError(f"the router did not start:\n{seen}")
        wait_ready(found[1], LIMIT_S)
        yield found[1], process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def test_the_official_client_through_the_router_and_a_server_that_ends():
    from openai import OpenAI

    with serving(FakeEngine()) as one, serving(FakeEngine()) as two:
        with router("--worker-urls", one.url, two.url + "/", "--policy", "round_robin") as (url, process):
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
            assert [m.id for m in client.models.list()] == ["tiny"]
            ask = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0.0}
            whole = [client.completions.create(**ask) for _ in range(2)]
            stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
            parts = list(stream)
            assert "".join(c.choices[0].text for c in parts if c.choices) == whole[0].choices[0].text == whole[1].choices[0].text
            assert parts[-1].usage.completion_tokens == 6
            assert one.engine.submits and two.engine.submits
            chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
            assert chat.usage.completion_tokens == 3
            bad = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": -1}, timeout=LIMIT_S)
            assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
            one.process.stop()
            for _ in range(4):
                assert client.completions.create(**ask).choices[0].text == whole[0].choices[0].text
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("flags", [("--port", "99999"), ("--worker-urls", "h:1"), ("--policy", "kv", "--host", "203.0.113.1")])
def test_wrong_flags_are_a_line_and_exit_code_2(flags):
    command = [sys.executable, "-m", "rorqual.launch", "router", *flags]
    if "--worker-urls" not in flags:
        command += ["--worker-urls", "http://127.0.0.1:1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and found.stderr.startswith("rorqual: error: ") and "Traceback" not in found.stderr
