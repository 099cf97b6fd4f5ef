"""CUDA graphs: captured once, replayed with other tokens, other routings and other counts, among eager calls."""

from __future__ import annotations

import random
from typing import Any

import torch

from .....comm.dispatcher import Dispatcher
from .....comm.peer import PeerDispatcher
from .faults import refuse
from .inputs import make_tokens
from .party import Party, answer, require, trip

BUCKETS = (4, 12, 24)


class Captured:
    """One bucket's graph over static inputs."""

    def __init__(self, party: Party, dispatcher: Dispatcher, bucket: int, layout: str) -> None:
        """Collective: all ranks capture, and warm up before."""
        spec, device = dispatcher.spec, party.device
        make_args = () if layout != "rank" else (spec,)
        self.x, self.ids, self.weights = party.here(make_tokens(party.rank, bucket, spec, "random", bucket))
        self.ids = self.ids.int()
        self.n_valid = torch.tensor([bucket], dtype=torch.int32, device=device)

        def run() -> torch.Tensor:
            routed = dispatcher.dispatch(self.x, self.ids, self.weights, self.n_valid, layout=layout, capacity=bucket)
            if torch.cuda.is_current_stream_capturing():
                refuse(RuntimeError, "inside a CUDA graph capture", routed.host_counts if layout != "rank" else party.make, *make_args)
            y, index = answer(routed, spec, party.rank)
            return dispatcher.combine(y, routed, index=index)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.synchronize(device)
        party.meet()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's own thread may ask for events
            self.out = run()
        party.meet()

    def replay(self, tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The results of up to ``bucket`` tokens, [bucket, hidden]."""
        n = len(tokens[0])
        self.n_valid.fill_(n)
        for static, given in zip((self.x, self.ids, self.weights), tokens, strict=True):
            static[:n].copy_(given)
        self.graph.replay()
        return self.out


def graphs(party: Party, replays: int = 1000) -> dict[str, Any]:
    """Replays of three buckets in random order, with eager calls between, equal what eager calls give."""
    if party.device.type != "cuda" or not getattr(torch.cuda, "CUDAGraph", None):
        return {"skipped": "needs CUDA"}
    for deterministic in party.reach.sums:
        dispatcher = party.make(party.spec(deterministic=deterministic))
        spec = dispatcher.spec
        if not dispatcher.caps.graph:
            dispatcher.close()
            return {"skipped": f"{dispatcher.name} cannot be captured"}
        sorted_rows = "contiguous" if isinstance(dispatcher, PeerDispatcher) else "masked"  # others know counts on the host there
        layout = "rank" if deterministic else sorted_rows
        captured = {bucket: Captured(party, dispatcher, bucket, layout) for bucket in BUCKETS}
        rng = random.Random(7)  # the same on all ranks
        inputs, want = [], []
        for seed in range(12):
            tokens = party.here(make_tokens(party.rank, (seed + party.rank) % (BUCKETS[seed % 3] + 1), spec, "with_none", seed))
            inputs.append(tokens)
            want.append(trip(dispatcher, party.rank, tokens))
        wrong = torch.zeros((), dtype=torch.int64, device=party.device)
        for number in range(replays // 2):
            seed = rng.randrange(12)
            tokens = inputs[seed]
            n = len(tokens[0])
            if number % 10 == 9:
                out = trip(dispatcher, party.rank, tokens)
            else:
                out = captured[BUCKETS[seed % 3]].replay(tokens)
                wrong += out[n:].ne(0).sum()
            wrong += out[:n].ne(want[seed]).sum()
            if number % 50 == 49:
                dispatcher.health()
        dispatcher.health(wait=True)
        require(int(wrong) == 0, "replays equal eager calls", int(wrong), deterministic)
        torch.cuda.synchronize(party.device)
        del captured
        party.meet()
        dispatcher.close()
    return {"replays": replays}


def busy(party: Party, rounds: int = 20) -> dict[str, Any]:
    """A side stream that keeps the whole GPU busy holds a dispatch up, and does not stop it."""
    if party.device.type != "cuda":
        return {"skipped": "needs CUDA"}
    dispatcher = party.make(party.spec())
    tokens = party.here(make_tokens(party.rank, 9, dispatcher.spec, "random", 4))
    want = trip(dispatcher, party.rank, tokens)
    side = torch.cuda.Stream(party.device)  # type: ignore[no-untyped-call]
    big = torch.randn(2048, 2048, device=party.device)
    side.wait_stream(torch.cuda.current_stream(party.device))
    for _ in range(rounds):
        with torch.cuda.stream(side):
            for _ in range(4):
                big = (big @ big).clamp(-1, 1)
        require(torch.equal(trip(dispatcher, party.rank, tokens), want), "a busy side stream changes nothing")
    dispatcher.health(wait=True)
    dispatcher.close()
    return {"rounds": rounds}
