"""Rank 0's socket: a private folder, peers that are gone, floods."""

from __future__ import annotations

import os
import stat
import time

import pytest
import zmq

from rorqual.engine.serving.link import FULL, GONE, MOST_WAITING, Link
from rorqual.engine.serving.wire import Abort, Goodbye, Hello, encode


def test_the_folder_is_private_and_goes_away():
    with Link() as link:
        folder = os.path.dirname(link.address.removeprefix("ipc://"))
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert not os.path.exists(folder)
    link.close()


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(ValueError, match="too long for a socket.*set TMPDIR"):
        Link(str(tmp_path / ("x" * 120)))


def test_messages_both_ways_and_a_peer_that_leaves():
    context = zmq.Context()
    with Link() as link:
        peer = context.socket(zmq.DEALER)
        peer.connect(link.address)
        peer.send(encode(Hello(version="1")))
        peer.send(b"\xc1 none")
        peer.send_multipart([b"two", b"frames"])
        found = []
        end = time.monotonic() + 20
        while len(found) < 3 and time.monotonic() < end:
            link.wait(0.2)
            found += link.receive(1.0)
        name = found[0][0]
        assert found[0][1] == Hello(version="1") and all(isinstance(m, ValueError) for _, m in found[1:])
        assert link.send(name, Goodbye(phase="drain", reason="x")) is None and peer.poll(20_000)
        peer.send(encode(Hello(version="2")))
        start = time.monotonic()
        link.wait(30)  # a message wakes it
        assert time.monotonic() - start < 20 and [m for _, m in link.receive(1.0)] == [Hello(version="2")]
        peer.close(0)
        while (why := link.send(name, Goodbye(phase="end", reason="x"))) is None:
            assert time.monotonic() < end, "a peer that is gone is not noticed"
            time.sleep(0.01)
        assert why == GONE and link.send(b"nobody", Goodbye(phase="end", reason="x")) == GONE
    context.term()


def test_what_waits_for_a_peer_that_does_not_read_is_bounded():
    context = zmq.Context()
    with Link() as link:
        idle, busy = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        names = []
        for peer in (idle, busy):
            peer.setsockopt(zmq.RCVHWM, 1)
            peer.connect(link.address)
            peer.send(encode(Hello(version="1")))
            link.wait(20)
            names += [name for name, _ in link.receive(1.0)]
        news, sent, start = Goodbye(phase="drain", reason="x" * 2000), 0, time.monotonic()
        while (why := link.send(names[0], news)) is None:
            sent += 1
            assert sent < 2 * MOST_WAITING + 1000 and time.monotonic() < start + 60
        assert why == FULL and sent >= MOST_WAITING
        start = time.monotonic()
        assert link.send(names[0], news) == FULL and time.monotonic() - start < 1.0  # a step is not held up
        assert link.send(names[1], news) is None and busy.poll(20_000)  # nor the others
        for peer in (idle, busy):
            peer.close(0)
    context.term()


def test_a_flood_is_read_in_parts():
    context = zmq.Context()
    with Link() as link:
        peer = context.socket(zmq.DEALER)
        peer.connect(link.address)
        for i in range(500):
            peer.send(encode(Abort(request_ids=[str(i)])))
        assert list(link.receive(0.0)) == []
        found, end = [], time.monotonic() + 20
        while len(found) < 500 and time.monotonic() < end:
            link.wait(0.1)
            found += [message.request_ids[0] for _, message in link.receive(0.001)]
        assert found == [str(i) for i in range(500)]
        peer.close(0)
    context.term()


def test_a_descriptor_wakes_it():
    read, write = os.pipe()
    with Link() as link:
        link.wake_by(read)
        os.write(write, b"x")
        start = time.monotonic()
        link.wait(30)
        assert time.monotonic() - start < 20
        link.forget_waker(read)
    os.close(read)
    os.close(write)
