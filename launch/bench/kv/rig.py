"""Attention of all layers of one decode step, with most rows in host memory: the ways to fetch them, each as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ....attention.kv.host.pool import HostPool
from ....attention.ops import AttentionOps
from .choosing import Choosing
from .feed import Feed
from .hits_first import found_rows, join
from .memory import RigMemory
from .products import Products
from .shape import RigShape
from .ways import Way

_ALL = slice(None)


class Rig:
    """Pools, traces and products, and the step over them."""

    def __init__(
        self,
        shape: RigShape,
        device: torch.device | str,
        ops: AttentionOps,
        *,
        host: HostPool | None = None,
        products: Products | None = None,
    ) -> None:
        """Allocate everything but what is given: a pool of ``memory.host_pool``, which the rig does not close, and products.

        Raises:
            ValueError: the machine has too little memory.
        """
        self.shape, self.device, self.ops = shape, torch.device(device), ops
        self.memory, self.feed = RigMemory(shape, self.device, host), Feed(shape, self.device)
        self.products = Products(shape, self.device) if products is None else products
        self.resident_rows = torch.empty_like(self.feed.positions)
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        hot = shape.requests * shape.hot_rows
        self._mark = torch.zeros(shape.layers, hot, dtype=torch.int32, device=self.device)
        self.choosing = Choosing(shape, self.device, ops) if shape.with_choice else None
        self.fetch_beside: Any = None  # a ``FetchConfig`` for fetches beside other work; None: the usual
        self._graphs: dict[Way, torch.cuda.CUDAGraph] = {}
        self._load()

    def close(self) -> None:
        """Give the memory back."""
        self._graphs.clear()
        self.memory.close()

    def use_fetch(self, config: Any) -> None:
        """Launch fetches beside other work by this ``FetchConfig`` from now on; None: as usual."""
        self.fetch_beside = config
        self._graphs.clear()

    def restart(self) -> None:
        """Back to the first step, with empty hot buffers."""
        self.memory.empty_hot_buffers()
        self.feed.restart()
        self._load()

    def advance(self) -> None:
        """The next step's choices."""
        self.feed.advance()
        self._load()

    def _load(self) -> None:
        size, memory = self.shape.page_size, self.memory
        memory.stamp += 1
        for kind, positions in enumerate(self.feed.positions):
            pages = memory.resident_table.gather(1, (positions // size).long())
            torch.add(pages * size, positions % size, out=self.resident_rows[kind])

    def step(self, way: Way, see: Callable[[torch.Tensor], None] | None = None) -> None:
        """Launch one step; ``see`` is shown every layer's attended latents [R, heads, C]."""
        for layer in range(self.shape.layers):
            attended = self._attended(way, layer)
            if attended is not None:
                if see is not None:
                    see(attended)
                self.products.finish(layer, attended)

    def run(self, way: Way) -> None:
        """One step, from a graph on CUDA."""
        if self.side is None:
            self.step(way)
            return
        if way not in self._graphs:
            self._graphs[way] = self._capture(way)
        self._graphs[way].replay()

    def _capture(self, way: Way) -> torch.cuda.CUDAGraph:
        self.step(way)  # compiles
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(way)
        return graph

    def _attended(self, way: Way, layer: int) -> torch.Tensor | None:
        if way == "tier":
            self._fetch(layer, self._resolve(layer, _ALL), _ALL)
            return None
        if way in ("parts", "waves"):
            return self._in_parts(layer, _cut(self.shape.requests, 2), waves=way == "waves")
        self._choose(layer, _ALL)
        if way == "resident":
            return self._attend(layer, *self._queries(layer), self.resident_rows[layer % self.shape.trace_kinds])
        found = self._resolve(layer, _ALL)
        if way in ("resolve", "serial"):
            if way == "serial":
                self._fetch(layer, found, _ALL)
            return self._attend(layer, *self._queries(layer), found.rows)
        if way == "hits":
            return self._hits_first(layer, found)
        return self._overlapped(layer, found, _cut(self.shape.requests, 2 if way == "halves" else 1))

    def _in_parts(self, layer: int, parts: list[slice], *, waves: bool) -> torch.Tensor:
        """Fetch a part beside the choice of the next and the queries; attend all at once, or each part when it is there."""
        found, arrived = [], []
        for number, part in enumerate(parts):
            self._choose(layer, part, beside=waves and number > 0)
            found.append(self._resolve(layer, part))
            with self._beside():
                self._fetch(layer, found[-1], _ALL)
                arrived.append(None if self.side is None else self.side.record_event())
        latent, rope = self._queries(layer)
        if waves:
            return self._attend_arriving(layer, latent, rope, parts, [each.rows for each in found], arrived)
        rows = torch.cat([each.rows for each in found])
        self._join()
        return self._attend(layer, latent, rope, rows)

    def _attend_arriving(
        self, layer: int, latent: torch.Tensor, rope: torch.Tensor, parts: list[slice], rows: list[torch.Tensor], arrived: list[Any]
    ) -> torch.Tensor:
        """Attend part by part, each as soon as its rows have arrived."""
        results = []
        for part, mine, event in zip(parts, rows, arrived, strict=True):
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
            results.append(self._attend(layer, latent[part], rope[part], mine))
        return results[0] if len(parts) == 1 else torch.cat(results)

    def _overlapped(self, layer: int, found: Any, parts: list[slice]) -> torch.Tensor:
        """Fetch part by part on the side; attend a part as soon as it is there."""
        arrived = []
        with self._beside():
            for part in parts:
                self._fetch(layer, found, part)
                arrived.append(None if self.side is None else self.side.record_event())
        latent, rope = self._queries(layer)
        return self._attend_arriving(layer, latent, rope, parts, [found.rows[part] for part in parts], arrived)

    def _hits_first(self, layer: int, found: Any) -> torch.Tensor:
        """Attend what was there while the rest is fetched."""
        with self._beside():
            self._fetch(layer, found, _ALL)
        hits = found_rows(found.rows, found.target, found.count, self._mark[layer], self.memory.stamp)
        queries = self._queries(layer)
        there = self._attend_rows(layer, *queries, hits)
        self._join()
        fetched = self._attend_rows(layer, *queries, found.target, found.count)
        return join(*there, *fetched)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched inside follows what was launched before, on the side stream."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            yield

    def _join(self) -> None:
        """What is launched from now on follows what is on the side stream."""
        if self.side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def _choose(self, layer: int, part: slice, *, beside: bool = False) -> None:
        if self.choosing is not None:
            self.choosing.run(layer, part, beside=beside)

    def _queries(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.products.queries(layer, self.shape.requests)

    def _resolve(self, layer: int, part: slice) -> Any:
        memory, (positions, scores) = self.memory, self.feed.of_layer(layer)
        by_score = self.shape.policy == "score"
        return self.ops.resolve_rows(
            positions[part], memory.latent_table[part], memory.host_table[part], memory.moving[part], memory.slots[part], memory.hot_table,
            memory.hot_positions[layer], memory.hot_stamps[layer], memory.stamp, memory.scratch[part], memory.counters[layer],
            page_size=self.shape.page_size, row_bytes=self.shape.row_bytes,
            scores=scores[part] if by_score else None, policy=self.shape.policy, usual=self.shape.usual_rows,
        )  # fmt: skip

    def _fetch(self, layer: int, found: Any, part: slice) -> None:
        memory = self.memory
        beside = self.side is not None and torch.cuda.current_stream(self.device) == self.side
        more = {"config": self.fetch_beside} if beside and self.fetch_beside is not None else {}
        self.ops.fetch_rows(
            memory.host.layer(layer), memory.pools[layer], found.source[part], found.target[part], found.count[part], **more
        )  # fmt: skip

    def _attend(self, layer: int, latent: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._attend_rows(layer, latent, rope, rows)[0]

    def _attend_rows(
        self, layer: int, latent: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor, n_keys: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (self.shape.nope + self.shape.rope) ** -0.5
        out, lse = self.ops.sparse_attention(latent, rope, self.memory.pools[layer], rows, scale=scale, n_keys=n_keys)
        return out, lse


def _cut(requests: int, parts: int) -> list[slice]:
    """``requests`` in so many parts, fewer where there are fewer requests."""
    parts = min(parts, requests)
    edges = [requests * part // parts for part in range(parts + 1)]
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
