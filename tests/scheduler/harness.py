"""A device that runs plans with a toy model, and a loop that drives a scheduler with it the way an engine does.

The toy model's cache row of a position is a hash of its token and of the row before, read through the page table; a
sampled token is a hash of all rows of the request. Freed pages are poisoned, sampled tokens reach the token table as
late as the pipeline allows, and every plan is checked against the launched steps that are still under way.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rorqual.engine.plan import StepPlan
from rorqual.engine.request import FinishReason, Request, RequestState
from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig

POISON = -1
VOCAB = 13
EOS = 0


def row_value(token: int, before: int) -> int:
    """The cache row of a position."""
    return zlib.crc32(token.to_bytes(8, "little", signed=True), before)


def sampled(rows: Iterable[int], seed: int) -> int:
    """The token that follows a request with these cache rows."""
    return zlib.crc32(np.asarray(list(rows), dtype=np.int64).tobytes(), seed & 0xFFFFFFFF) % VOCAB


def make_request(name: str, index: int, prompt: Sequence[int], *, priority: int = 0, **params: object) -> Request:
    values = {"temperature": 0.0, "seed": index + 7, "max_tokens": 8, **params}
    return Request(request_id=name, index=index, prompt_ids=list(prompt), params=SamplingParams(**values), priority=priority)


def make_config(**values: object) -> SchedulerConfig:
    base = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 4, "n_pages": 32, "max_model_len": 64}
    return SchedulerConfig(**{**base, "eos_token_ids": (EOS,), "seed": 3, **values})


def lone_run(request: Request, config: SchedulerConfig) -> tuple[list[int], FinishReason, int | None]:
    """Tokens, reason and stop reason of a request that runs by itself on a device without pages."""
    params, rows, out = request.params, [0], []
    limit = min(len(request.prompt_ids) + params.max_tokens, config.max_model_len) - len(request.prompt_ids)
    for token in request.prompt_ids:
        rows.append(row_value(token, rows[-1]))
    while True:
        token = sampled(rows[1:], params.seed)
        out.append(token)
        if len(out) > params.min_tokens:
            if token in config.eos_token_ids and not params.ignore_eos:
                return out, FinishReason.STOP, None
            if token in params.stop_ids:
                return out, FinishReason.STOP, token
        if len(out) == limit:
            return out, FinishReason.LENGTH, None
        rows.append(row_value(token, rows[-1]))


class FakeDevice:
    """Device tables, a page store and the toy model. Runs plans in order; results are fetched when the host asks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        columns = -(-config.max_model_len // config.page_size)
        self.tokens = np.full((config.max_num_seqs, config.max_model_len + 1), -1, dtype=np.int64)
        self.table = np.full((config.max_num_seqs, columns), -1, dtype=np.int64)
        self.store = np.full((config.n_pages, config.page_size), POISON, dtype=np.int64)
        self.seeds = np.zeros(config.max_num_seqs, dtype=np.int64)
        self.results: dict[int, list[int]] = {}
        self.reads: dict[int, set[int]] = {}  # step -> pages it reads or writes
        self._late: deque[tuple[int, int, int, int]] = deque()  # step from which it is there, slot, position, token

    def launch(self, plan: StepPlan) -> None:
        while self._late and self._late[0][0] <= plan.step:
            _, slot, position, token = self._late.popleft()
            self.tokens[slot, position] = token
        self._enter(plan)
        for slot, index, page in plan.pages.tolist():
            self.table[slot, index] = page
        self.store[plan.freed_pages] = POISON
        self.results[plan.step], self.reads[plan.step] = [], set()
        for slot, start, count, samples in zip(*(a.tolist() for a in (plan.slots, plan.starts, plan.counts, plan.samples)), strict=True):
            self._row(plan.step, slot, start, count, samples)

    def _enter(self, plan: StepPlan) -> None:
        at = 0
        for slot, length, _, _, seed, *_ in plan.new_ints.tolist():
            self.tokens[slot], self.table[slot], self.seeds[slot] = -1, -1, seed
            self.tokens[slot, :length] = plan.new_tokens[at : at + length]
            at += length
        assert at == len(plan.new_tokens)

    def _row(self, step: int, slot: int, start: int, count: int, samples: bool) -> None:
        size, end = self.config.page_size, start + count
        pages = self.table[slot, : -(-end // size)]
        assert (pages >= 0).all(), f"step {step}: slot {slot} has no page for a position below {end}"
        self.reads[step].update(pages.tolist())
        before = 0 if start == 0 else int(self.store[pages[(start - 1) // size], (start - 1) % size])
        assert before != POISON
        for position in range(start, end):
            token = int(self.tokens[slot, position])
            assert token >= 0, f"step {step}: slot {slot} reads a token at {position} that nobody wrote"
            before = row_value(token, before)
            self.store[pages[position // size], position % size] = before
        if samples:
            rows = self.store[pages].reshape(-1)[:end]
            assert (rows != POISON).all(), f"step {step}: slot {slot} reads a poisoned row"
            token = sampled(rows, int(self.seeds[slot]))
            self.results[step].append(token)
            self._late.append((step + self.config.pp, slot, end, token))


@dataclass
class Loop:
    """Drives a scheduler: schedule, check the plan, launch, and handle the results that are ``lag`` steps old."""

    config: SchedulerConfig
    launch_empty: bool = False  # other replicas have work, so that empty plans are launched too
    hurry: bool = False  # when nothing was launched, do not wait for the lag
    on_token: Callable[[Scheduler, Request], None] | None = None
    check_each_step: bool = True
    events: list[tuple[Request, int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = True

    def __post_init__(self) -> None:
        self.scheduler, self.device = self.make()
        self.under_way: deque[tuple[StepPlan, bool]] = deque()
        self._carried = np.zeros(0, dtype=np.int32)
        self._sampled_at: dict[int, int] = {}

    def make(self) -> tuple[Scheduler, FakeDevice]:
        return Scheduler(self.config), FakeDevice(self.config)

    def tick(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        if self.keep_plans:
            self.plans.append(plan)
        launched = plan.n_rows > 0 or self.launch_empty
        if launched:
            plan.freed_pages = np.concatenate([self._carried, plan.freed_pages])
            self._carried = np.zeros(0, dtype=np.int32)
            self.device.launch(plan)
        else:
            self._carried = np.concatenate([self._carried, plan.freed_pages])
        self.under_way.append((plan, launched))
        self._settle(plan.step - self.config.lag, in_hurry=self.hurry and not launched)
        if self.check_each_step:
            self.scheduler.check()
        return plan

    def _settle(self, limit: int, *, in_hurry: bool) -> None:
        while self.under_way and (in_hurry or self.under_way[0][0].step <= limit):
            plan, launched = self.under_way.popleft()
            if launched:
                self._complete(plan)
            else:
                self.scheduler.skip(plan.step)

    def _complete(self, plan: StepPlan) -> None:
        tokens = self.device.results.pop(plan.step)
        del self.device.reads[plan.step]
        for request, token in self.scheduler.complete(plan.step, tokens):
            assert request.output_ids[-1] == token
            self.events.append((request, token))
            if self.on_token is not None:
                self.on_token(self.scheduler, request)

    def run(self, requests: Iterable[Request] = (), *, limit: int = 100_000) -> None:
        """Add the requests and run until idle."""
        for request in requests:
            self.scheduler.add(request)
        ticks = 0
        while self.scheduler.has_work:
            self.tick()
            ticks += 1
            assert ticks < limit, "the scheduler does not come to an end"
        self.drain()

    def drain(self) -> None:
        """Handle everything under way (at the end all of it is empty plans)."""
        self._settle(1 << 60, in_hurry=True)
        assert self.scheduler.idle
        self.scheduler.check()

    def check_plan(self, plan: StepPlan) -> None:
        """Rules that every plan keeps, seen from outside."""
        config, busy = self.config, set().union(*self.device.reads.values())
        assert len(set(plan.slots.tolist())) == plan.n_rows, "a request has two rows"
        assert plan.n_tokens <= config.max_num_batched_tokens and (plan.counts >= 1).all()
        requests = self.scheduler.requests_of(plan.step)
        assert [r.slot for r in requests] == plan.slots.tolist() and all(r.state is RequestState.RUNNING for r in requests)
        assert not busy.intersection(plan.freed_pages.tolist()), "a page is freed that a launched step reads"
        busy_slots = {slot for p, launched in self.under_way if launched for slot in p.slots.tolist()}
        entering = plan.new_ints[:, 0].tolist()
        assert not busy_slots.intersection(entering), "a slot is reused that a launched step names"
        for slot in entering:
            self._sampled_at.pop(slot, None)
        decoding = [request.slot in self._sampled_at for request in requests]
        for request, samples in zip(requests, plan.samples.tolist(), strict=True):
            assert all(self.scheduler._pool.pages.refs(page) > 0 for page in request.pages), "a page table names a free page"
            last = self._sampled_at.get(request.slot)
            assert last is None or last + config.pp <= plan.step, "a request decodes before its token is at the first stage"
            if samples:
                self._sampled_at[request.slot] = plan.step
                assert request.total_len <= min(len(request.prompt_ids) + request.params.max_tokens, config.max_model_len)
        multi = [count > 1 for count in plan.counts.tolist()]
        assert not any(first and late for first, late in zip(multi, decoding[1:], strict=False)), "a decode row comes after a prefill row"


def expect_lone(requests: Iterable[Request], config: SchedulerConfig) -> None:
    """Every request ended with the tokens and the reason of its lone run."""
    for request in requests:
        assert request.state is RequestState.FINISHED
        assert (request.output_ids, request.finish_reason, request.stop_reason) == lone_run(request, config), request.request_id
