"""The compiling process: results, hostile forms within limits, what is kept, crashes, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from rorqual.engine.grammar.structured import Form, StructuredOutputsParams
from rorqual.engine.server.parsers.names import ParserNames
from rorqual.engine.server.structured import Structured, StructuredBusy
from rorqual.engine.server.structured.process import CompilerGone
from tests.server.structured.folder import EOS, FOLDER, VOCAB

pytest.importorskip("xgrammar")

TIMEOUT = 2.0


class Loop:
    """One service for all tests of the module: its process takes seconds to start."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.service = Structured(folder=FOLDER, vocab_size=VOCAB, eos_token_ids=EOS, timeout=TIMEOUT, memory_mib=512)

    def run(self, work: Callable[[Structured], Awaitable[object]], seconds: float = 60.0) -> object:
        return self.loop.run_until_complete(asyncio.wait_for(work(self.service), seconds))

    def compile(self, body: dict, **more: object) -> str | None:
        return self.run(lambda s: s.compile_for(body, **more))

    @property
    def pid(self) -> int:
        return self.service._process._process.pid


@pytest.fixture(scope="module")
def compiling():
    loop = Loop()
    loop.run(lambda s: s._process.start(), 120.0)
    yield loop
    pid = loop.pid
    loop.run(lambda s: s.close())
    loop.loop.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_grammars_fit_the_engine(compiling):
    from rorqual.engine.grammar.guides import Guides
    from rorqual.engine.text.tokenizer import Tokenizer

    guides = Guides(Tokenizer.load(FOLDER), VOCAB, EOS)
    names = ParserNames(reasoning="deepseek_v32", tools="deepseek_v32")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]
    for body in ({"response_format": {"type": "json_object"}}, {"guided_regex": "a+"}, {"guided_choice": ["x", "é"]},
                 {"tools": tools, "tool_choice": "required"}, {"tools": tools, "guided_regex": "a+"}):  # fmt: skip
        guides.check(compiling.compile(body, names=names, prompt="<think>"))
    assert compiling.compile({}) is None


NESTED = {"type": "string"}
for _ in range(12):
    NESTED = {"anyOf": [NESTED, NESTED]}
DEEP = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}

HOSTILE = {
    "powers": {"guided_regex": "(" * 9 + "a" + "){1,300}" * 9},
    "parentheses": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "stars": {"guided_grammar": "root ::= " + " ".join('(("a"|"b")*)*' for _ in range(300))},
    "alternatives": {"guided_json": NESTED},
    "depth": {"guided_json": DEEP},
    "keys": {"guided_json": {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": "a{1,9}"} for i in range(4000)}}},
    "long": {"guided_choice": ["a" * 100_000] * 9},
    "huge": {"guided_regex": "a" * 2_000_000},
    "surrogate": {"guided_regex": "\ud800"},
    "nul": {"guided_regex": "\x00("},
    "endless": {"guided_grammar": "root ::= root"},
    "references": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "file": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "class": {"guided_regex": "[" + "".join(f"\\u{i:04x}" for i in range(0x4E00, 0x6000)) + "]{1,1000}["},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_end_in_time_with_the_reason(compiling, name):
    start = time.monotonic()
    with pytest.raises(ValueError) as found:
        compiling.compile(HOSTILE[name])
    assert time.monotonic() - start < TIMEOUT + 20  # what is slow is the machine
    assert 10 < len(str(found.value)) < 2000
    again = time.monotonic()
    with pytest.raises(ValueError):
        compiling.compile(HOSTILE[name])
    assert time.monotonic() - again < 1.0  # known by now
    assert compiling.compile({"guided_choice": [name]})  # it goes on


def test_many_that_ask_for_the_same_wait_for_one(compiling):
    asks = []

    async def work(service):
        ask = service._process.ask

        async def counting(form, timeout):
            asks.append(form)
            return await ask(form, timeout)

        service._process.ask = counting
        try:
            return await asyncio.gather(*(service.compile_for({"guided_regex": "same[0-9]"}) for _ in range(50)))
        finally:
            service._process.ask = ask

    assert len(set(compiling.run(work))) == 1 and len(asks) == 1


def test_one_who_gives_up_does_not_stop_the_others(compiling):
    async def work(service):
        first = asyncio.create_task(service.compile_for({"guided_regex": "left[0-9]"}))
        second = asyncio.create_task(service.compile_for({"guided_regex": "left[0-9]"}))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert compiling.run(work)


def test_too_many_at_once_are_told_so(compiling):
    async def work(service):
        bodies = [{"guided_regex": f"many{i}"} for i in range(80)]
        return await asyncio.gather(*(service.compile_for(body) for body in bodies), return_exceptions=True)

    found = compiling.run(work, 120.0)
    busy = [x for x in found if isinstance(x, StructuredBusy)]
    assert len(busy) >= 16 and all(isinstance(x, (str, StructuredBusy)) for x in found)


def test_a_compiling_process_that_dies_is_started_again(compiling):
    async def work(service):
        waiting = asyncio.create_task(service.compile_for(HOSTILE["powers"] | {"guided_regex": "((((b{1,99}){1,99}){1,99}){1,99}){1,99}"}))
        await asyncio.sleep(0.2)
        os.kill(service._process._process.pid, signal.SIGKILL)
        with pytest.raises(StructuredBusy):
            await waiting
        return await service.compile_for({"guided_regex": "again"})

    assert compiling.run(work, 120.0)


def test_a_process_that_is_being_ended_is_not_asked(compiling):
    form = Form(asked=StructuredOutputsParams(regex="a+")).to_wire()

    async def work(service):
        process = service._process
        await process.start()
        old = process._process
        os.kill(old.pid, signal.SIGSTOP)
        first = asyncio.create_task(process.ask(form, 0.1))
        while process._process is old:  # it is killed, and its end is awaited
            await asyncio.sleep(0)
        second = await process.ask(form, 60.0)
        with pytest.raises(CompilerGone, match="did not answer"):
            await first
        return second, await process.ask(form, 60.0)

    assert all(answer["grammar"] for answer in compiling.run(work, 120.0))


def test_a_compiling_process_does_not_know_the_key(compiling):
    async def work(service):
        os.environ["RORQUAL_API_KEY"] = "very-secret"
        try:
            await service._process.close()
            await service._process.start()
        finally:
            del os.environ["RORQUAL_API_KEY"]

    compiling.run(work, 120.0)
    with open(f"/proc/{compiling.pid}/environ") as file:
        assert "very-secret" not in file.read()


CHILD = """
import os, signal, sys
from rorqual.engine.server.structured import sandbox
sandbox._limit(5.0, 64 << 20)
try:
    bytearray(256 << 20)
    os._exit(1)
except MemoryError:
    pass
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(b"x")
    os._exit(2)
except OSError:
    os._exit(0)
"""


def test_limits_of_a_child(tmp_path):
    """It cannot write a file, nor take more memory than it has. In a process of its own: this one may have freed as much before."""
    assert subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "never")], timeout=60, cwd=tmp_path).returncode == 0


def test_without_a_tokenizer_the_reason_is_told():
    async def work():
        service = Structured(folder="", vocab_size=VOCAB, eos_token_ids=EOS)
        await service.start()
        try:
            assert await service.compile_for({}) is None
            with pytest.raises(ValueError, match="needs a tokenizer"):
                await service.compile_for({"guided_regex": "a"})
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    async def work():
        service = Structured(folder=str(tmp_path), vocab_size=VOCAB, eos_token_ids=EOS)
        try:
            with pytest.raises(ValueError, match="no tokenizer"):
                await service.compile_for({"guided_regex": "a"})
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(work(), 120))
