"""Looking at the prefix tree and at the queue without changing them."""

from __future__ import annotations

import numpy as np

from rorqual.engine.request import Request, RequestState
from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.scheduling.prefix_cache import PrefixCache
from rorqual.engine.scheduling.waiting import WaitingQueue


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_what_the_tree_covers():
    cache = PrefixCache(2)
    cache.insert(ids(1, 2, 3, 4, 5, 6), [0, 1, 2])
    cache.insert(ids(1, 2, 3, 4, 7, 8), [0, 1, 3])
    nodes = cache.n_nodes
    for tokens in (ids(), ids(1), ids(1, 2), ids(1, 2, 3), ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3, 4, 7, 8, 9)):
        assert cache.covers(tokens) and len(cache.match(tokens)[0]) == len(tokens) // 2
    for tokens in (ids(1, 9), ids(1, 2, 3, 4, 5, 7), ids(1, 2, 3, 4, 5, 6, 7, 8)):
        assert not cache.covers(tokens) and len(cache.match(tokens)[0]) < len(tokens) // 2
    fresh = PrefixCache(2)
    fresh.insert(ids(1, 2, 3, 4, 5, 6), [0, 1, 2])
    assert fresh.covers(ids(1, 2, 3, 4)) and fresh.n_nodes == 1 and nodes == 3  # no node is split for a look


def test_who_is_near_the_front():
    queue, requests = WaitingQueue(), []
    for index, priority in enumerate((2, 0, 1, 0, 2)):
        params = SamplingParams(max_tokens=1)
        requests.append(Request(request_id=str(index), index=index, prompt_ids=[1], params=params, priority=priority))
        queue.push(requests[-1])
    assert queue.near(1) == [requests[1]] and set(map(id, queue.near(9))) == set(map(id, requests))
    requests[1].move(RequestState.FINISHED)
    assert requests[1] not in queue.near(9)
