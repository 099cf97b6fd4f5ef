"""Random scripts: whatever arrives, ends or is taken away, every request's tokens are those of its lone run."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rorqual.engine.request import FinishReason, Request
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from tests.scheduler.harness import Loop, lone_run, make_config, make_request


@dataclass(repr=False)
class Arrival:
    """A request, when it comes, and what happens to it."""

    request: Request
    tick: int
    abort_at: int | None  # tick of its abort
    preempt_at: int | None  # tick at which its pages are taken for no reason
    cut_at: int | None  # output tokens after which the caller finds a stop string


@dataclass(repr=False)
class Script:
    """A configuration and arrivals."""

    config: SchedulerConfig
    arrivals: list[Arrival]
    launch_empty: bool
    hurry: bool
    flushes: set[int] = field(default_factory=set)


@st.composite
def scripts(draw):
    size = draw(st.sampled_from([1, 4, 16]))
    max_len = draw(st.integers(6, 40))
    arrivals = []
    for i in range(draw(st.integers(1, 8))):
        head = draw(st.sampled_from([[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 9]]))
        prompt = (head + draw(st.lists(st.integers(1, 3), max_size=10)) or [1])[: max_len - 1]
        request = make_request(
            f"r{i}",
            i,
            prompt,
            priority=draw(st.integers(-1, 1)),
            max_tokens=draw(st.integers(2, 20)),
            min_tokens=draw(st.integers(0, 2)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([[], [3]])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
            seed=draw(st.integers(0, 3)),
        )
        maybe = st.one_of(st.none(), st.none(), st.integers(0, 40))
        arrivals.append(
            Arrival(request, draw(st.integers(0, 30)), draw(maybe), draw(maybe), draw(st.one_of(st.none(), st.none(), st.integers(1, 4))))
        )
    largest = max(-(-min(len(a.request.prompt_ids) + a.request.params.max_tokens, max_len) // size) for a in arrivals)
    config = make_config(
        page_size=size,
        n_pages=largest + draw(st.sampled_from([0, 0, 1, 2, 5, 40])),
        max_model_len=max_len,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 7, 64])),
        pp=draw(st.integers(1, 3)),
        overlap=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        admission_horizon=draw(st.sampled_from([0, 0, 16])),
    )
    flushes = draw(st.sets(st.integers(0, 40), max_size=2))
    return Script(config, arrivals, draw(st.booleans()), draw(st.booleans()), flushes)


def play(script, make_loop=Loop):
    """Run the script; rules are checked at every step, rule 9 at every step and at every idle point."""
    cuts = {a.request.request_id: a.cut_at for a in script.arrivals}

    def on_token(scheduler, request):
        if len(request.output_ids) == cuts[request.request_id]:
            scheduler.finish(request, FinishReason.STOP, "cut", keep_tokens=cuts[request.request_id] - 1)

    loop = make_loop(script.config, launch_empty=script.launch_empty, hurry=script.hurry, on_token=on_token, keep_plans=False)
    last = max([a.tick for a in script.arrivals] + [a.abort_at or 0 for a in script.arrivals])
    work = sum(len(a.request.prompt_ids) + a.request.params.max_tokens for a in script.arrivals)
    tick = 0
    while tick <= last or loop.scheduler.has_work:
        for arrival in script.arrivals:
            if arrival.tick == tick:
                loop.scheduler.add(arrival.request)
            if arrival.abort_at == tick:
                loop.scheduler.abort(arrival.request.request_id)
            if arrival.preempt_at == tick:
                loop.scheduler.preempt(arrival.request.request_id)
        if tick in script.flushes:
            loop.scheduler.flush_prefix_cache()
        loop.tick()
        if loop.scheduler.idle:
            loop.scheduler.check()
        tick += 1
        assert tick <= last + 60 * work, "no progress"
    loop.drain()
    return loop


def expect(arrival, config):
    request = arrival.request
    tokens, reason, stop = lone_run(request, config)
    if request.finish_reason is FinishReason.ABORT:
        assert arrival.abort_at is not None and request.output_ids == tokens[: len(request.output_ids)]
    elif arrival.cut_at is not None and arrival.cut_at <= len(tokens):
        assert (request.output_ids, request.finish_reason, request.stop_reason) == (tokens[: arrival.cut_at - 1], FinishReason.STOP, "cut")
    else:
        assert (request.output_ids, request.finish_reason, request.stop_reason) == (tokens, reason, stop)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_every_request_ends_with_the_tokens_of_its_lone_run(script):
    loop = play(script)
    for arrival in script.arrivals:
        expect(arrival, script.config)
        request = arrival.request
        assert (request.slot, request.pages, request.n_launched) == (-1, [], 0)
        # Each loss of pages is for a request of higher rank that goes on: no more often than those have rows to compute.
        above = [a.request for a in script.arrivals if (a.request.priority, a.request.index) < (request.priority, request.index)]
        assert request.preemptions <= sum(len(r.prompt_ids) + r.params.max_tokens for r in above) + (arrival.preempt_at is not None)
    streamed: dict[str, list[int]] = {}
    for request, token in loop.events:
        streamed.setdefault(request.request_id, []).append(token)
    for arrival in script.arrivals:
        tokens = streamed.get(arrival.request.request_id, [])
        assert tokens[: len(arrival.request.output_ids)] == arrival.request.output_ids
