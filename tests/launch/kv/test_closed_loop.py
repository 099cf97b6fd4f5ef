"""Clients played out over step and copy times, and how many requests fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rorqual.launch.bench.kv.capacity import Capacity
from rorqual.launch.bench.kv.closed_loop import System, play
from rorqual.launch.bench.kv.shape import RigShape

PLAIN = System(name="x", step_s={1: 1.0, 4: 2.0}, copy_s=0.0, blocks=False, cold_s=0.0, capacity=8)


def test_steps_lie_on_a_line_between_the_measured():
    assert [PLAIN.step(b) for b in (1, 4)] == [1.0, 2.0]
    assert PLAIN.step(2) == pytest.approx(4 / 3) and PLAIN.step(8) == pytest.approx(4.0)
    assert replace(PLAIN, rest_s=0.5).step(1) == 1.5


def test_one_client_sees_its_own_steps():
    found = play(replace(PLAIN, copy_s=3.0, cold_s=0.5), clients=1, output=10)
    assert found.ttft_s == pytest.approx(4.5) and found.tbt_s == pytest.approx(1.0)
    assert found.tokens_per_s == pytest.approx(10 / 13.5)


def test_full_batches_without_copies():
    found = play(PLAIN, clients=4, output=100)
    assert found.tbt_s == pytest.approx(2.0) and found.tokens_per_s == pytest.approx(2.0, rel=0.02)


def test_clients_beyond_the_capacity_wait():
    few = play(replace(PLAIN, capacity=1), clients=4, output=10)
    assert few.tokens_per_s == pytest.approx(1.0) and few.tbt_s == pytest.approx(1.0)
    assert few.ttft_s == pytest.approx(3 * 10 + 1, rel=0.05)  # the first of them came while shorter ones were served


def test_copies_that_block_stretch_the_time_between_tokens():
    beside = play(replace(PLAIN, copy_s=20.0), clients=4, output=100)
    waits = play(replace(PLAIN, copy_s=20.0, blocks=True), clients=4, output=100)
    assert beside.tbt_s <= 2.0 and waits.tbt_s > 2.2
    assert waits.tokens_per_s < beside.tokens_per_s


def test_the_link_serves_one_copy_at_a_time():
    found = play(replace(PLAIN, copy_s=500.0), clients=4, output=10)
    assert found.tokens_per_s == pytest.approx(10 / 500.0, rel=0.05)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="a closed loop needs a client"):
        play(PLAIN, clients=0, output=10)
    with pytest.raises(ValueError, match="needs measured steps and room for one request"):
        replace(PLAIN, capacity=0)


def test_capacity_counts_index_keys_and_hot_buffers():
    room = Capacity(shape=RigShape(requests=1), tokens=131_072, budget=40 << 30)
    assert room.index_bytes == 131_072 * 132 * 61 and room.latent_bytes == 131_072 * 656 * 61
    assert room.resident() == 6
    most = room.offloaded()
    assert room.offloaded_bytes(most) <= room.budget < room.offloaded_bytes(most + 1)
    assert most >= 5 * room.resident()
