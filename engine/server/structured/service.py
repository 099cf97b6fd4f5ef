"""What the routes ask for grammars: the form of a request, compiled once and kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ...grammar.structured import Form
from ..parsers.force import reasoning_mode, tool_tag
from ..parsers.names import REASONING_FORMATS, ParserNames
from .asked import asked_form
from .process import CompilerGone, CompilerProcess

#: bytes of compiled grammars that are kept
_KEPT_BYTES = 128 << 20
#: seconds for which a refusal is kept: one who asks again and again must not keep the compiler busy
_REFUSED_S = 60.0
#: seconds in which the compiling process must be ready; it imports much
_BOOT_S = 120.0
#: seconds after the start of the server: what is more urgent then goes first
_WARM_AFTER_S = 2.0
#: grammars compiled at once, and those that may wait for it
_WORKERS, _MOST_WAITING = 2, 64


class StructuredBusy(RuntimeError):
    """The compiler has too much to do, or is not there; nothing is wrong with the request."""


class Structured:
    """Compiles what requests ask for in a process with limits. Everything is made when first needed, or by ``start``."""

    def __init__(
        self, *, folder: str, vocab_size: int, eos_token_ids: Sequence[int], timeout: float = 10.0, memory_mib: int = 1024,
        max_form_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        """``folder`` of the tokenizer, "" for none; the rest of the engine's ``Welcome``.

        ``timeout`` seconds and ``memory_mib`` are for one grammar, ``max_form_bytes`` for what is asked for, as JSON.
        """
        self._folder = folder
        self._timeout = timeout
        self._most = max_form_bytes
        settings = {
            "folder": folder, "vocab_size": vocab_size, "eos_ids": list(eos_token_ids), "timeout": timeout,
            "memory_bytes": memory_mib << 20, "workers": _WORKERS,
        }  # fmt: skip
        self._process = CompilerProcess(settings, _BOOT_S)
        self._kept: OrderedDict[str, str] = OrderedDict()  # the least recently used first
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[str]] = {}
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to start the compiling process; returns at once."""
        if self._folder and self._starting is None:
            self._starting = asyncio.create_task(self._warm())

    async def _warm(self) -> None:
        await asyncio.sleep(_WARM_AFTER_S)
        try:
            await self._process.start()
        except (ValueError, CompilerGone, OSError):
            pass  # the first request that needs it is told why

    async def close(self) -> None:
        """End the compiling process."""
        tasks = [*self._under_way.values(), *([] if self._starting is None else [self._starting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._process.close()

    async def compile_for(
        self, body: Mapping[str, Any], *, names: ParserNames | None = None, prompt: str = "", large: bool = False
    ) -> str | None:
        """The compiled grammar that the output of a request must match; None where it is free.

        Args:
            body: the request as sent: response_format, structured_outputs, guided_*, tools, tool_choice, parallel_tool_calls.
            names: the server's parsers, for chats.
            prompt: the rendered chat.
            large: the request is; others get their turn while it is looked at.

        Raises:
            ValueError: the form is wrong, cannot be kept, or takes too long to compile; with the reason.
            StructuredBusy: try again later.
        """
        form = form_of(body, names, prompt)
        if form is None:
            return None
        if not self._folder:
            raise ValueError("structured output needs a tokenizer, and this server runs without (--skip-tokenizer-init)")
        try:
            text = await self._written(form) if large else json.dumps(form.to_wire(), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the form of the output cannot be written as JSON: {error}") from None
        if len(text) > self._most:
            raise ValueError(f"the form of the output has {len(text)} or more characters as JSON, {self._most} are allowed; simplify it")
        return await self._compiled(form, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())

    async def _written(self, form: Form) -> str:
        """The form as JSON, or so much of it that it is too long."""
        made, size = [], 0
        for place, part in enumerate(json.JSONEncoder(ensure_ascii=False).iterencode(form.to_wire())):
            made.append(part)
            size += len(part)
            if size > self._most:
                break
            if place % 10_000 == 9999:
                await asyncio.sleep(0)  # a long one does not hold up the others' streams
        return "".join(made)

    async def _compiled(self, form: Form, key: str) -> str:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        until, problem = self._refused.get(key, (0.0, ""))
        if time.monotonic() < until:
            raise ValueError(problem)
        task = self._under_way.get(key)
        if task is None:
            if len(self._under_way) >= _MOST_WAITING:
                raise StructuredBusy(f"{_MOST_WAITING} grammars wait to be compiled; try again later")
            task = self._under_way[key] = asyncio.create_task(self._compile(form, key))
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)  # others may wait for it too

    async def _compile(self, form: Form, key: str) -> str:
        try:
            # The sandbox answers by itself within a turn in its queue and one of compiling.
            answer = await self._process.ask(form.to_wire(), 2 * self._timeout + 10.0)
        except CompilerGone as error:
            raise StructuredBusy(f"{error}; try again") from None
        except OverflowError:
            raise ValueError(
                "the form of the output has a whole number beyond 64 bits; write it as one with a point, or leave it out"
            ) from None
        if answer.get("busy"):
            raise StructuredBusy("grammars wait too long to be compiled; try again later")
        if "error" in answer:
            self._refused[key] = (time.monotonic() + _REFUSED_S, answer["error"])
            while len(self._refused) > 1024:
                self._refused.popitem(last=False)
            raise ValueError(answer["error"])
        grammar: str = answer["grammar"]
        self._kept[key] = grammar
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return grammar


def form_of(body: Mapping[str, Any], names: ParserNames | None, prompt: str) -> Form | None:
    """The form of a request, None where the output is free.

    With a form of the answer and tools that the model may call, the output is one or the other.

    Raises:
        ValueError: fields that are malformed, or ask for what cannot be together.
    """
    asked = asked_form(body)
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    choice = choice or ("auto" if tools else "none")
    tag = None
    if tools or choice != "none":
        if names is None:
            raise ValueError("tools are for chats; use /v1/chat/completions")
        forced = choice not in ("none", "auto")
        if asked is not None and forced:
            raise ValueError("a form of the answer and a tool_choice that asks for a call cannot both be kept; send one of them")
        may = "required" if asked is not None and choice == "auto" and names.tools is not None else choice
        parallel = body.get("parallel_tool_calls") is not False
        tag = tool_tag(names, prompt=prompt, tools=tools, tool_choice=may, parallel_tool_calls=parallel)
    if asked is None and tag is None:
        return None
    if names is None or names.reasoning is None:
        return Form(asked=asked, tools=tag)
    marks = REASONING_FORMATS[names.reasoning]
    return Form(asked=asked, tools=tag, reasoning=reasoning_mode(names, prompt), begin=marks.begin, end=marks.end)
