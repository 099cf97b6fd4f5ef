"""Experts that travel beside the steps."""

import numpy as np

from rorqual.moe.eplb.simulation.transfer import Transfer


def test_every_byte_travels_once_layers_arrive_in_order_and_no_step_has_more_than_its_budget():
    rng = np.random.default_rng(0)
    for budget in (1, 7, 10, 25, 1000):
        coming = rng.integers(0, 4, (6, 3))
        order = rng.permutation(6).tolist()
        transfer = Transfer(np.zeros((6, 4), dtype=np.int64), coming, order=order, expert_bytes=10)
        parts = []
        while not transfer.done:
            parts.append(transfer.advance(budget))
            assert len(parts) < 1000
        assert sum(part.bytes for part in parts) == coming.sum() * 10
        assert sum(part.bytes_of_a_rank for part in parts) == coming.max(1).sum() * 10
        assert max(part.bytes_of_a_rank for part in parts) <= budget
        assert [layer for part in parts for layer in part.arrived] == order


def test_a_layer_without_arrivals_is_switched_with_the_first_step():
    transfer = Transfer(np.zeros((2, 4), dtype=np.int64), np.zeros((2, 3), dtype=np.int64), order=[1], expert_bytes=10)
    part = transfer.advance(5)
    assert part.arrived == (1,) and part.bytes == part.bytes_of_a_rank == 0 and transfer.done
