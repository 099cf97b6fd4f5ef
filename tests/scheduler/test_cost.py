"""What scheduling costs: little per step, and nothing for requests that have ended."""

import time

import numpy as np

from rorqual.engine.scheduling.scheduler import Scheduler
from tests.scheduler.harness import make_config, make_request


def step(scheduler):
    """One step without a device; seconds of processor time spent in the scheduler."""
    start = time.process_time()
    plan = scheduler.schedule()
    scheduler.complete(plan.step, [5] * plan.n_samples)
    return time.process_time() - start


def test_a_decode_step_of_64_requests_takes_less_than_a_millisecond():
    config = make_config(max_num_seqs=64, max_num_batched_tokens=4096, page_size=16, n_pages=8192, max_model_len=2048, overlap=False)
    scheduler = Scheduler(config)
    for i in range(64):
        scheduler.add(make_request(str(i), i, [i] * 20, max_tokens=1000, ignore_eos=True))
    for i in range(64, 200):
        scheduler.add(make_request(str(i), i, [i] * 20, max_tokens=1000))
    times = [step(scheduler) for _ in range(400)]
    assert scheduler.n_running == 64 and scheduler.n_waiting == 136
    assert float(np.median(times[10:])) < 1e-3


def test_cost_per_step_is_flat_in_the_number_of_finished_requests():
    """10,000 requests pass through 32 slots; the last steps cost what the first ones did, and all pages come back."""
    config = make_config(max_num_seqs=32, max_num_batched_tokens=512, page_size=4, n_pages=400, max_model_len=64, overlap=False)
    scheduler, times = Scheduler(config), []
    added = 0
    while added < 10_000 or scheduler.has_work:
        while added < 10_000 and scheduler.n_waiting < 40:
            prompt = [added % 7 + 1] * 4 + [added % 501 + 1] * (added % 5 + 1)
            scheduler.add(make_request(str(added), added, prompt, max_tokens=3 + added % 4, ignore_eos=True))
            added += 1
        times.append(step(scheduler))
    scheduler.check()
    assert scheduler.idle and scheduler._pool.slots.n_free == 32 and len(scheduler._requests) == 0
    assert len(scheduler._pool.cache._heap) <= 2 * scheduler._pool.cache.n_nodes + 64
    assert scheduler.stats.evictions > 1000 and scheduler.stats.cached_tokens > 1000
    # What is there in every step shows in the quickest tenth too, and other work on the machine less.
    early, late = np.quantile(times[100:500], 0.1), np.quantile(times[-600:-200], 0.1)
    assert late < 2 * early, f"{early * 1e6:.0f} us per step early, {late * 1e6:.0f} us late"
