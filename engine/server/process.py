"""One HTTP process: application, engine client and uvicorn on a socket that is bound already."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..sampling_params import SamplingParams
from ..serving.wire import ALIVE_EVERY_S
from ..text.tokenizer import read_json_object
from .app import make_app
from .client import EngineClient
from .config import ServerConfig
from .http_counts import HttpCounts
from .needs import need
from .parsers import choose_parsers
from .state import ServerState
from .texts import Texts

log = logging.getLogger("rorqual.server")

#: fields of generation_config.json that are defaults of sampling
_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class HttpProcess:
    """Runs until it is told to stop, or until the engine is gone."""

    def __init__(
        self, config: ServerConfig, address: str, listener: socket.socket, *, name: str = "http-0", counts_folder: str | None = None
    ) -> None:
        """``address`` of the engine's socket; ``listener`` is bound and listening, and closed at the end."""
        uvicorn = need("uvicorn")
        need("httptools")
        from .protocol import guarded

        self.listener = listener
        self._parent = os.getppid()
        own = counts_folder is not None and address == f"ipc://{counts_folder}/engine.sock"
        self._folder = counts_folder if own else None  # that of rank 0 and its HTTP processes alone
        client = EngineClient(address, name=name, on_lost=self._engine_lost)
        self.state = ServerState(config=config, client=client, counts=HttpCounts(counts_folder))
        self.app = make_app(self.state, lifespan=self._lifespan)
        settings = uvicorn.Config(
            self.app, http=guarded(config.header_timeout, config.send_timeout), loop=_loop(), ws="none", lifespan="on", log_config=None,
            access_log=not config.disable_access_log, server_header=False, proxy_headers=False, backlog=2048,
            timeout_keep_alive=config.keep_alive_timeout, timeout_graceful_shutdown=5,
            ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
        )  # fmt: skip
        self.server = uvicorn.Server(settings)
        self.code = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> int:
        """Serve; the exit code: 0, or 1 when the engine was lost."""
        raise_file_limit()
        # signals are rank 0's to handle: it drains and then ends this process
        self.server.capture_signals = nullcontext
        self.server.run(sockets=[self.listener])
        if self._folder is not None and os.getppid() != self._parent:  # rank 0 was killed: what it would have removed
            shutil.rmtree(self._folder, ignore_errors=True)
        return self.code

    def stop(self) -> None:
        """End soon; safe from any thread."""
        self.server.should_exit = True

    def lose_engine(self, reason: str) -> None:
        """Tell all who wait that the engine is gone, and end; safe from any thread."""
        loop = self._event_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.state.client.lose, reason)
        self.stop()

    def _engine_lost(self, reason: str) -> None:
        ended = self.state.client.ending is not None
        if ended:
            log.info("%s: ended: %s", self.state.client.name, reason)
        else:
            log.error("%s: the engine is gone: %s", self.state.client.name, reason)
        self.code = 0 if ended else 1
        self.server.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        """Connect to the engine when uvicorn starts; leave it when it ends."""
        self._event_loop = asyncio.get_running_loop()
        self.state.client.start()
        self._tasks = [asyncio.create_task(self._prepare()), asyncio.create_task(self._publish()), asyncio.create_task(self._live())]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            if self.state.structured is not None:
                await self.state.structured.close()
            if self.state.texts is not None:
                self.state.texts.close()
            self.state.client.close()

    async def _publish(self) -> None:
        while True:
            self.state.counts.publish()
            await asyncio.sleep(1.0)

    async def _live(self) -> None:
        """Signs of life: a loop that is hung gives none, and this process is replaced."""
        while True:
            self.state.client.say_alive()
            await asyncio.sleep(ALIVE_EVERY_S)

    async def _prepare(self) -> None:
        """Once the engine is ready: tokenizer, chat format, parsers, defaults."""
        state, config = self.state, self.state.config
        try:
            welcome = await state.client.ready(float("inf"))
            load = asyncio.get_running_loop().run_in_executor
            texts = await load(None, lambda: Texts(welcome.folder, model_type=welcome.model_type, chat_template=config.chat_template))
            state.defaults = sampling_defaults(welcome.folder) if config.generation_config == "auto" else {}
            template = texts.template_source()
            state.parsers = choose_parsers(
                welcome.model_type, template, reasoning=config.reasoning_parser, tools=config.tool_call_parser,
                special_tokens=texts.special_tokens(),
            )  # fmt: skip
            state.structured = make_structured(config, welcome)
            if state.structured is not None:
                await state.structured.start()
            state.texts = texts
            log.info("%s: ready; reasoning parser %s, tool-call parser %s", state.client.name,
                     state.parsers.reasoning or "none", state.parsers.tools or "none")  # fmt: skip
        except ConnectionError:
            return  # the engine is gone, which was told
        except Exception as error:
            state.failed = f"this server cannot serve: {error}"
            log.error("%s: %s", state.client.name, state.failed, exc_info=not isinstance(error, ValueError))
            self.code, self.server.should_exit = 3, True


def sampling_defaults(folder: str) -> dict[str, Any]:
    """Default sampling parameters of the model's generation_config.json.

    Raises:
        ValueError: the file has a value out of range.
    """
    if not folder:
        return {}
    path = Path(folder) / "generation_config.json"
    values = {name: value for name, value in read_json_object(path).items() if name in _GENERATION_FIELDS and value is not None}
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; mend it, or start with --generation-config none") from None
    return values


def make_structured(config: ServerConfig, welcome: Any) -> Any:
    """The compiler of grammars; None when there is no tokenizer or no xgrammar."""
    if not welcome.folder:
        return None
    try:
        from .structured import Structured
    except ImportError:
        return None
    return Structured(
        folder=welcome.folder, vocab_size=welcome.vocab_size, eos_token_ids=welcome.eos_token_ids, timeout=config.structured_compile_timeout
    )


def raise_file_limit() -> None:
    """Allow as many open files, hence connections, as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop() -> str:
    """uvloop where it is installed."""
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return "asyncio"
    return "uvloop"
