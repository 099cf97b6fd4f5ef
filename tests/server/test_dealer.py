"""The HTTP process' socket: messages that raise, and all that was said before the engine went."""

import asyncio
import time

import pytest
import zmq

from rorqual.engine.server.socket import Dealer

MANY = 1000  # more than a burst


@pytest.fixture
def router(tmp_path):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.bind(f"ipc://{tmp_path}/s")
    yield socket
    socket.close(linger=0)
    context.term()


def run(router, tmp_path, on_message, act, until, on_gone=lambda: None):
    """A dealer that says hello to ``router``, which then does ``act(router, peer)``; waits until ``until()``."""

    async def main():
        dealer = Dealer(f"ipc://{tmp_path}/s", "x", on_message, on_gone)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        dealer.open()
        try:
            dealer.send(b"hello")
            peer = (await asyncio.to_thread(router.recv_multipart))[0]
            act(router, peer)
            async with asyncio.timeout(20):
                while not until():
                    await asyncio.sleep(0.01)
        finally:
            dealer.close()

    router.setsockopt(zmq.RCVTIMEO, 20_000)
    asyncio.run(main())


def test_a_message_that_raises_does_not_hold_up_the_others(router, tmp_path):
    got = []

    def take(data):
        got.append(data)
        if len(got) % 3 == 0:
            raise RuntimeError("a bug")

    def act(socket, peer):
        for i in range(MANY):
            socket.send_multipart([peer, str(i).encode()])

    run(router, tmp_path, take, act, lambda: len(got) == MANY)
    assert got == [str(i).encode() for i in range(MANY)]


def test_all_that_was_said_comes_before_the_end(router, tmp_path):
    got, at_the_end = [], []

    def act(socket, peer):
        for i in range(MANY):
            socket.send_multipart([peer, str(i).encode()])
        socket.close(linger=5000)
        time.sleep(0.5)  # on the event loop, which reads nothing until the connection is closed

    run(router, tmp_path, got.append, act, lambda: at_the_end, lambda: at_the_end.append(len(got)))
    assert at_the_end == [MANY]
