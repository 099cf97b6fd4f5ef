"""Questions to all ranks between two steps: every rank does its part, rank 0 gathers what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..messages import Ask
from .profiling import MOST_STEPS, RankProfiler

if TYPE_CHECKING:
    from ..engine import Engine

log = logging.getLogger("rorqual")


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rank has to say."""

    body: dict[str, Any] = {}
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_answer = msgspec.msgpack.Decoder(Answer)


class Controls:
    """One rank's part. ``run`` is collective: every rank calls it with the same question, at the same place between steps."""

    #: what may be asked
    names = ("flush_cache", "expert_load", "stats", "start_profile", "stop_profile", "ping")

    def __init__(self, engine: Engine, profile_folder: str | None, on_answers: Callable[[Ask, list[Answer]], None] | None = None) -> None:
        """``on_answers``: rank 0 gets the answers of all ranks, in rank order."""
        self._engine = engine
        self._profiler = RankProfiler(engine.grid, engine.runner, engine.stage, profile_folder)
        self._on_answers = on_answers

    def run(self, ask: Ask) -> None:
        """Do it, and tell rank 0."""
        mine, world = self._do(ask), self._engine.grid.world
        if world.index != 0:
            world.send_bytes(_encoder.encode(mine), 0)
            return
        answers = [mine] + [_answer.decode(world.recv_bytes(rank)) for rank in range(1, world.size)]
        if self._on_answers is not None:
            self._on_answers(ask, answers)

    def _do(self, ask: Ask) -> Answer:
        try:
            part = getattr(self, f"_{ask.name}") if ask.name in self.names else None
            if part is None:
                raise ValueError(f"there is no {ask.name!r}; known: {list(self.names)}")
            return Answer(body=part(**ask.args))
        except Exception as error:  # an answer too: only this question has failed
            log.warning("rank %d: %s failed", self._engine.grid.rank, ask.name, exc_info=True)
            return Answer(error=f"rank {self._engine.grid.rank}: {error}")

    def _ping(self) -> dict[str, Any]:
        return {}

    def _stats(self) -> dict[str, Any]:
        return self._engine.rank_stats()

    def _flush_cache(self) -> dict[str, Any]:
        leader = self._engine.leader
        return {} if leader is None else {"pages": leader.scheduler.flush_prefix_cache()}

    def _expert_load(self) -> dict[str, Any]:
        stage = self._engine.stage
        if stage.load is None:
            return {}
        return {"layers": [layer.layer for layer in stage.model.moe_layers()], "counts": stage.load.counts.tolist()}

    def _start_profile(self, num_steps: int = MOST_STEPS) -> dict[str, Any]:
        return {"folder": self._profiler.start(num_steps)}

    def _stop_profile(self) -> dict[str, Any]:
        return {"folder": self._profiler.stop()}


def merge(name: str, answers: list[Answer]) -> dict[str, Any]:
    """One body out of those of all ranks.

    Raises:
        ValueError: what the first rank that failed had to say.
    """
    for answer in answers:
        if answer.error is not None:
            raise ValueError(answer.error)
    bodies = [answer.body for answer in answers]
    if name == "stats":
        return {"ranks": bodies}
    if name == "flush_cache":
        return {"pages": sum(body.get("pages", 0) for body in bodies)}
    if name == "expert_load":
        return _sum_loads([body for body in bodies if body])
    return bodies[0]


def _sum_loads(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all ranks, [layers, experts], for the sparse layers of all stages."""
    if not bodies:
        raise ValueError("no load of experts is counted: the model has no experts, or enable_expert_load is off")
    layers = sorted({layer for body in bodies for layer in body["layers"]})
    rows = [[sum(column) for column in zip(*(body["counts"][layer] for body in bodies), strict=True)] for layer in layers]
    return {"layers": layers, "counts": rows}
