"""The compiling process as the HTTP process sees it: started, asked, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from typing import Any

from ..config import KEY_VARIABLES
from .frames import HEADER, length, pack, unpack

_MODULE = "rorqual.engine.server.structured.sandbox"


class CompilerGone(RuntimeError):
    """The compiling process ended before it answered."""


class CompilerProcess:
    """One compiling process. ``ask`` may be called by many tasks at once."""

    def __init__(self, settings: dict[str, Any], boot_s: float) -> None:
        """``settings``: see ``sandbox.main``. ``boot_s``: seconds in which it has to be ready."""
        self._settings = settings
        self._boot_s = boot_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._names = itertools.count(1)
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        """It is ready."""
        return self._process is not None and self._reader is not None and not self._reader.done()

    async def start(self) -> None:
        """Start it, unless it runs.

        Raises:
            ValueError: structured output is not possible with this model; the message says why.
            CompilerGone: it did not come up.
        """
        async with self._starting:
            if self.running:
                return
            await self._kill()  # one that has ended by itself
            environment = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
            environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _MODULE, json.dumps(self._settings), env=environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            try:
                hello = await asyncio.wait_for(_frame(process), self._boot_s)
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                await self._kill()
                raise CompilerGone(f"the process that compiles grammars was not ready within {self._boot_s:g} s") from None
            except BaseException:
                await self._kill()
                raise
            if "error" in hello:
                await self._kill()
                raise ValueError(hello["error"])
            self._waiting = {}
            self._reader = asyncio.create_task(_read(process, self._waiting))

    async def ask(self, form: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to one form (see ``Sandbox``).

        Raises:
            CompilerGone: the process ended, or did not answer within ``timeout`` seconds and was ended.
            ValueError: as ``start``.
        """
        await self.start()
        process, waiting = self._process, self._waiting
        assert process is not None and process.stdin is not None
        name, answer = next(self._names), asyncio.get_running_loop().create_future()
        waiting[name] = answer
        try:
            process.stdin.write(pack({"id": name, "form": form}))
            await process.stdin.drain()
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:  # before OSError, of which it is one
            if self._process is process:  # else somebody else has ended it already
                await self._kill()
            raise CompilerGone(f"the process that compiles grammars did not answer within {timeout:g} s") from None
        except OSError:
            raise CompilerGone("the process that compiles grammars has ended") from None
        finally:
            waiting.pop(name, None)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if reader is not None:
            reader.cancel()  # which tells all that wait
            await asyncio.wait((reader,))

    async def close(self) -> None:
        """End it."""
        await self._kill()


async def _frame(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    return unpack(await process.stdout.readexactly(length(await process.stdout.readexactly(HEADER))))


async def _read(process: asyncio.subprocess.Process, waiting: dict[int, asyncio.Future[dict[str, Any]]]) -> None:
    """Hand answers to who waits for them, until the process ends."""
    try:
        while True:
            answer = await _frame(process)
            future = waiting.get(answer["id"])
            if future is not None and not future.done():
                future.set_result(answer)
    except (asyncio.IncompleteReadError, OSError, ValueError, KeyError):
        pass
    finally:
        for future in waiting.values():
            if not future.done():
                future.set_exception(CompilerGone("the process that compiles grammars has ended"))
