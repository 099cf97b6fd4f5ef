"""A server in a thread of the test, over a fake engine."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from rorqual.engine.server.config import ServerConfig
from rorqual.engine.server.process import HttpProcess
from tests.server.fake_engine import FakeEngine


@dataclass(kw_only=True)
class Served:
    """A running server."""

    engine: FakeEngine
    process: HttpProcess
    port: int
    _http: Any = None
    _openai: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def http(self) -> Iterator[httpx.Client]:
        """A client; one for all tests of a server, since making one takes long."""
        if self._http is None:
            self._http = httpx.Client(base_url=self.url, timeout=20)
        yield self._http

    def openai(self) -> Any:
        """The official client, also made once."""
        from openai import OpenAI

        if self._openai is None:
            self._openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)
        return self._openai

    def close(self) -> None:
        for client in (self._http, self._openai):
            if client is not None:
                client.close()


@contextlib.contextmanager
def serving(engine: FakeEngine | None = None, *, wait: bool = True, **settings: Any) -> Iterator[Served]:
    """A server over ``engine`` (a new one by default), with ``settings`` of ``ServerConfig``."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engine if engine is not None else FakeEngine())
        process = HttpProcess(ServerConfig(**{"disable_access_log": True, **settings}), engine.address or "", listener)
        thread = threading.Thread(target=process.run, name="server", daemon=True)
        thread.start()
        stack.callback(_stop, process, thread)
        served = Served(engine=engine, process=process, port=listener.getsockname()[1])
        stack.callback(served.close)
        if wait:
            wait_ready(served.url)
        yield served


def wait_ready(url: str, seconds: float = 20.0) -> None:
    """Wait until /health says 200."""
    end = time.monotonic() + seconds
    answer: Any = None
    while time.monotonic() < end:
        try:
            answer = httpx.get(url + "/health", timeout=5)
            if answer.status_code == 200:
                return
        except httpx.HTTPError as error:
            answer = error
        time.sleep(0.05)
    raise AssertionError(f"{url} was not ready within {seconds} s: {answer!r}")


def _stop(process: HttpProcess, thread: threading.Thread) -> None:
    process.stop()
    thread.join(15)
    if thread.is_alive():
        logging.error("the server's thread did not end within 15 s")
        raise AssertionError("the server's thread did not end within 15 s")
