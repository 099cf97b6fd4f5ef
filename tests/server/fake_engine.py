"""An engine over the wire without torch, for tests of everything above it.

``with FakeEngine() as engine:`` binds ``engine.address`` and answers from a thread of its own. Tokens are a function of
(prompt, seed, completion, position) only, so a test can say what a request must give: ``expected_ids`` and ``expected_text``.

As a process: ``python -m tests.server.fake_engine --address ipc:///tmp/x.sock --delay 0.01``.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import rorqual
from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.serving import wire
from rorqual.engine.text.detokenizer import Detokenizer
from rorqual.engine.text.tokenizer import Tokenizer
from tests.server.fake_run import Running, pseudo_token

TINY = Path(rorqual.__file__).parent / "launch" / "tiny"
#: what a script gives: the text of a completion (needs a tokenizer), its token ids, or None for pseudo tokens
Script = Callable[[wire.Submit, int], str | list[int] | None]


@dataclass(kw_only=True)
class FakeEngine:
    """See the module. Every knob may be changed while it runs."""

    folder: str | None = str(TINY)  # of the tokenizer; None: works on ids only, pieces have no text
    address: str | None = None  # ipc://...; None: in a private temporary folder
    model: str = "tiny"
    model_type: str = "deepseek_v32"
    vocab: int = 4096
    eos: tuple[int, ...] = (1,)
    max_model_len: int = 8192
    dp_size: int = 1
    delay: float = 0.0  # seconds before each token
    first_delay: float = 0.0  # seconds before the first one, on top
    chunk: int = 1  # tokens a piece
    script: Script | None = None
    refuse: Callable[[wire.Submit], wire.Refused | None] | None = None
    fail_after: int | None = None  # tokens after which a completion ends with reason "error"
    cached_tokens: int = 0
    replies: dict[str, Any] = field(default_factory=dict)  # control name -> body, or an Exception: the reply is not ok
    snapshot: wire.Snapshot | None = None  # sent once a second when set
    silent: bool = False  # take messages, answer nothing

    submits: list[wire.Submit] = field(default_factory=list)
    aborts: list[wire.Abort] = field(default_factory=list)
    controls: list[wire.Control] = field(default_factory=list)
    clients: set[bytes] = field(default_factory=set)
    heard: dict[bytes, float] = field(default_factory=dict)  # client -> time.monotonic() of its last message
    error: BaseException | None = None  # that ended the thread

    def __post_init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._running: dict[tuple[str, int], Running] = {}
        self._stop = threading.Event()
        self._say: list[wire.Down] = []
        self._tokenizer = None if self.folder is None else Tokenizer.load(self.folder)
        self._next_snapshot = 0.0

    # ---- life

    def __enter__(self) -> "FakeEngine":
        if self.address is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fake-engine-")
            self.address = f"ipc://{self._folder.name}/engine.sock"
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._main, name="fake-engine", daemon=True)
        self._thread.start()
        if not self._bound.wait(10):
            raise AssertionError("the fake engine could not bind within 10 s")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def stop(self) -> None:
        """Close the socket, as an engine that dies does: nobody is told."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the fake engine's thread did not end within 10 s"

    def say(self, message: wire.Down) -> None:
        """Send a message to every client, e.g. ``wire.Goodbye``."""
        self._say.append(message)

    @property
    def open(self) -> int:
        """Completions in flight."""
        return len(self._running)

    def wait(self, true: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
        """Wait until ``true()``; AssertionError naming ``what`` after ``seconds``."""
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {seconds} s (open {self.open}, submits {len(self.submits)})")
            time.sleep(0.005)

    # ---- what a request must give

    def expected_ids(self, prompt: list[int], n_tokens: int, *, seed: int | None = None, index: int = 0) -> list[int]:
        """The pseudo tokens of a request."""
        return [pseudo_token(prompt, seed or 0, index, position, self.vocab) for position in range(n_tokens)]

    def expected_text(self, prompt: list[int], n_tokens: int, *, seed: int | None = None, index: int = 0, **params: Any) -> str:
        """The text of a request, cut at stop strings in ``params``."""
        assert self._tokenizer is not None
        text, out = Detokenizer(self._tokenizer, SamplingParams(max_tokens=n_tokens, **params), eos_ids=self.eos), ""
        for token in self.expected_ids(prompt, n_tokens, seed=seed, index=index):
            piece = text.push(token)
            out += piece.text
            if piece.stop is not None:
                return out
        return out + text.flush().text

    # ---- the loop

    def _main(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        try:
            socket.bind(self.address)
            self._bound.set()
            while not self._stop.is_set():
                self._tick(socket)
        except BaseException as error:  # noqa: BLE001 - shown by the test that asks for it
            self.error = error
            raise
        finally:
            socket.close(linger=0)
            context.term()

    def _tick(self, socket: Any) -> None:
        now = time.monotonic()
        wait = min((r.due for r in self._running.values()), default=now + 0.05) - now
        if socket.poll(max(0, min(50, int(wait * 1000 + 0.999)))):
            while True:
                try:
                    client, data = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(socket, client, wire.decode_up(data))
        news: dict[bytes, list[wire.Piece]] = {}
        if not self.silent:
            now = time.monotonic()
            for run in [r for r in self._running.values() if r.due <= now]:
                piece = run.step(self)
                if piece.finish_reason is not None:
                    del self._running[(run.submit.request_id, run.index)]
                news.setdefault(run.client, []).append(piece)
        for client, pieces in news.items():
            socket.send_multipart([client, wire.encode(wire.News(pieces=pieces))])
        said = list(self._say)
        del self._say[: len(said)]
        if self.snapshot is not None and now >= self._next_snapshot:
            said.append(self.snapshot)
            self._next_snapshot = now + 1.0
        for message in said:
            for client in self.clients:
                socket.send_multipart([client, wire.encode(message)])

    def _take(self, socket: Any, client: bytes, message: wire.Up) -> None:
        def answer(down: wire.Down) -> None:
            if not self.silent:
                socket.send_multipart([client, wire.encode(down)])

        self.heard[client] = time.monotonic()
        if isinstance(message, wire.Hello):
            self.clients.add(client)
            answer(self.welcome())
        elif isinstance(message, wire.Submit):
            self.submits.append(message)
            refused = self.refuse(message) if self.refuse is not None else None
            if refused is not None:
                answer(refused)
            else:
                self._start(client, message)
        elif isinstance(message, wire.Abort):
            self.aborts.append(message)
            gone = [r for r in self._running.values() if message.everything or r.submit.request_id in message.request_ids]
            for run in gone:
                del self._running[(run.submit.request_id, run.index)]
                piece = wire.Piece(request_id=run.submit.request_id, index=run.index, finish_reason="abort")
                if not self.silent:
                    socket.send_multipart([run.client, wire.encode(wire.News(pieces=[piece]))])
        elif isinstance(message, wire.Control):
            self.controls.append(message)
            body = self.replies.get(message.name, {})
            bad = isinstance(body, Exception)
            answer(wire.Reply(control_id=message.control_id, ok=not bad, body={} if bad else body, error=str(body) if bad else None))

    def welcome(self) -> wire.Welcome:
        """What a client is told."""
        return wire.Welcome(
            protocol=wire.PROTOCOL, version=rorqual.__version__, model=self.model, folder=self.folder or "", model_type=self.model_type,
            max_model_len=self.max_model_len, vocab_size=self.vocab, eos_token_ids=list(self.eos), dp_size=self.dp_size,
            layout=f"pp1 dp{self.dp_size} tp1", device="cpu", page_size=64, pool_tokens=1 << 20, started=time.time(),
        )  # fmt: skip

    def _start(self, client: bytes, submit: wire.Submit) -> None:
        params = SamplingParams.from_wire(submit.params)
        prompt = np.frombuffer(submit.prompt, dtype="<i4").tolist()
        for index in range(params.n):
            given = self.script(submit, index) if self.script is not None else None
            if isinstance(given, str):
                assert self._tokenizer is not None
                given = [*self._tokenizer.encode(given, add_special_tokens=False), self.eos[0]]
            text = None if self._tokenizer is None else Detokenizer(self._tokenizer, params, eos_ids=self.eos)
            self._running[(submit.request_id, index)] = Running(
                client=client, submit=submit, index=index, params=params, prompt=prompt, tokens=given, text=text,
                due=time.monotonic() + self.delay + self.first_delay, dp_rank=submit.dp_rank or len(self.submits) % self.dp_size,
            )  # fmt: skip


def main(argv: list[str]) -> int:
    """Run until stdin closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--chunk", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--no-tokenizer", action="store_true")
    args = parser.parse_args(argv)
    folder = None if args.no_tokenizer else str(TINY)
    with FakeEngine(address=args.address, delay=args.delay, chunk=args.chunk, dp_size=args.dp_size, folder=folder):
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
