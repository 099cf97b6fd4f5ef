"""Decode steps as captured graphs: from the block of inputs to the sampled tokens without the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..attention.kv.tier import TierStep
from ..parallel.backends import kernels_or_twin
from .graph_batch import decode_batch
from .graph_key import GraphKey, choose_graph
from .kernels.step_edges_torch import StepEntry
from .lanes import Lanes
from .offload.tier_places import TierPlaces
from .plan import StepPlan
from .ranges import part
from .sampling.sample_rows import SampleRows
from .sampling.sampler import greedy
from .step_inputs import InputLayout, StepInputs, block_size
from .streams import HostCopy, Streams, borrow
from .tables import DeviceTables


class DecodeModel(Protocol):
    """What is captured."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64 -> [T, hidden]."""

    def __call__(self, x: torch.Tensor, batch: Any, cache: Any, shared_topk: None) -> tuple[torch.Tensor, Any]:
        """The layers: x [T, hidden] -> ([T, hidden], a selection)."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, vocab] float32."""


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """What the graphs of one rank cost."""

    graphs: int  # captured so far
    seconds: float  # spent on capturing, warm-up included
    bytes: int  # device memory they hold
    replays: int  # steps run from a graph


@dataclass(kw_only=True)
class _Captured:
    """One graph and where its results are."""

    replay: Callable[[], None]
    inputs: StepInputs
    hidden: torch.Tensor  # [B, hidden] of the last layer
    logits: torch.Tensor  # [B, vocab] fp32


@dataclass(frozen=True, kw_only=True)
class DecodeOutputs:
    """Results of a replayed step of n rows; what is on the device is good until the next step."""

    n: int
    tokens: HostCopy  # [n] int64, the highest logit of every row, on its way to the host
    captured: _Captured

    @property
    def hidden(self) -> torch.Tensor:
        """[n, hidden] of the last layer."""
        return self.captured.hidden[: self.n]

    @property
    def logits(self) -> torch.Tensor:
        """[n, vocab] fp32."""
        return self.captured.logits[: self.n]

    def arrays(self, rows: SampleRows) -> dict[str, torch.Tensor]:
        """What sampling after the graph needs, by the names of ``HeadJob.arrays``; it came up with the step's inputs."""
        n, inputs = self.n, self.captured.inputs
        found = {"picked": inputs.slots[:n], "ends": inputs.starts[:n] + 1}
        return found | {"random": inputs.random[: len(rows.random)], "penalised": inputs.penalised[: len(rows.penalised)]}


class DecodeGraphs:
    """One graph per batch size and context length, captured at the start or when first used. Captures are collective."""

    def __init__(
        self,
        *,
        model: DecodeModel,
        cache: Any,
        tables: DeviceTables,
        page_size: int,
        streams: Streams,
        sizes: Sequence[int],
        contexts: Sequence[int],
        make_batch: Callable[..., Any] = decode_batch,
        places: TierPlaces | None = None,
        dense: int = 0,
    ) -> None:
        """``places``: the tier tables, with offloading; contexts up to ``dense`` never miss a page."""
        self.sizes, self.contexts = tuple(sizes), tuple(contexts)
        self._model, self._cache, self._tables, self._page_size = model, cache, tables, page_size
        self._streams, self._make_batch = streams, make_batch
        self._edges = _edges(streams)
        self._places, self._dense = places, dense
        self._layout = InputLayout(
            spare_slot=tables.spare_slot, table_width=tables.pages.shape[1], dummy_page=tables.dummy_page, places=places
        )
        most, device = self.sizes[-1], streams.device
        self._block = torch.zeros(self._size(most), dtype=torch.int64, device=device)
        self._rows = torch.arange(most, device=device)
        self._lanes = Lanes(streams, block=self._size(most), batch=most)
        self._captured: dict[GraphKey, _Captured] = {}
        self._seconds, self._bytes = 0.0, 0

    @property
    def stats(self) -> GraphStats:
        """Costs so far."""
        return GraphStats(graphs=len(self._captured), seconds=self._seconds, bytes=self._bytes, replays=self._lanes.steps)

    def summary(self) -> str:
        """What there is, in one line."""
        stats = self.stats
        what = f"batches {_span(self.sizes)}, contexts up to {', '.join(map(str, self.contexts))}"
        return f"CUDA graphs: {stats.graphs} captured in {stats.seconds:.1f} s, {stats.bytes / 2**20:.0f} MiB; {what}"

    def key(self, plan: StepPlan) -> GraphKey | None:
        """The graph that runs ``plan``, None when it must run eagerly."""
        offloaded = None if self._places is None else plan.dp_offloaded
        return choose_graph(plan.dp_tokens, plan.dp_context, self.sizes, self.contexts, offloaded, self._dense)

    def fits(self, plan: StepPlan, key: GraphKey) -> bool:
        """Whether the graph assigns the plan's pages; otherwise they have to be in the table before."""
        return self._layout.fits(plan, key.batch)

    def capture_all(self) -> None:
        """Capture every graph, largest first, so that the smaller ones find room in its memory."""
        for context in reversed(self.contexts):
            for batch in reversed(self.sizes):
                for offloaded in (True, False) if self._places is not None and context > self._dense else (False,):
                    self._get(GraphKey(batch=batch, context=context, offloaded=offloaded))

    def _get(self, key: GraphKey) -> _Captured:
        if key not in self._captured:
            self._captured[key] = self._capture(key)
        return self._captured[key]

    def _capture(self, key: GraphKey) -> _Captured:
        start, before = time.monotonic(), _device_bytes(self._streams)
        try:
            with self._padding(key) as inputs:
                replay, (hidden, logits) = self._streams.capture(lambda: self._body(inputs, key))
        except RuntimeError as error:
            where = f"a decode step of {key.batch} rows and contexts up to {key.context}"
            raise RuntimeError(f"capturing {where} as a CUDA graph failed; --enforce-eager runs without graphs ({error})") from error
        captured = _Captured(replay=replay, inputs=inputs, hidden=borrow(hidden), logits=borrow(logits))
        self._seconds += time.monotonic() - start
        self._bytes += max(0, _device_bytes(self._streams) - before)
        return captured

    @contextmanager
    def _padding(self, key: GraphKey) -> Iterator[StepInputs]:
        """Inputs without a request, for runs that must not touch what requests own."""
        block = np.zeros(self._size(key.batch), dtype=np.int64)
        self._layout.pack(block, StepPlan(step=-1), None, key.batch)
        self._lanes.rest(block)
        yield StepInputs.views(self._block, key.batch, self._layout.moves(key.batch))
        self._lanes.resume()

    def rehearse(self, key: GraphKey) -> None:
        """Launch the work of a graph one by one, on padding, for a profiler."""
        with self._padding(key) as inputs:
            self._body(inputs, key)

    def _body(self, inputs: StepInputs, key: GraphKey) -> tuple[torch.Tensor, torch.Tensor]:
        """What is captured: (hidden rows, logits)."""
        tables, batch, ops = self._tables, key.batch, self._edges
        used = -(-key.context // self._page_size)
        slots, starts, lanes = inputs.slots, inputs.starts, self._lanes
        ops.fetch_inputs(lanes.inputs, lanes.counter, self._block[: self._size(batch)])
        entry = ops.enter_step(
            slots, starts, inputs.page_at, inputs.page, tables.tokens, tables.pages, page_size=self._page_size, used=used
        )
        more = {} if self._places is None else {"tier": self._tier(inputs, entry, key, self._places)}
        step = self._make_batch(entry, starts, self._rows[:batch], self._page_size, key.context, inputs.n_valid, **more)
        hidden, _ = self._model(self._model.embed(entry.ids), step, self._cache, None)
        logits = self._model.logits(hidden)
        with part("sampling"):
            ops.leave_step(greedy(logits), slots, starts, tables.tokens, lanes.tokens, lanes.counter)
        return hidden.contiguous(), logits.contiguous()

    def _size(self, batch: int) -> int:
        return block_size(batch, self._layout.moves(batch))

    def _tier(self, inputs: StepInputs, entry: StepEntry, key: GraphKey, places: TierPlaces) -> TierStep:
        """Change the tier tables, then look up where the rows' pages are."""
        tables, changes = places.tables, (inputs.place_at, inputs.place, inputs.moving_at, inputs.moving)
        self._edges.put_places(*changes, places.flat, tables.moving, tables.stamp, advance=key.offloaded)
        size = self._page_size
        return tables.step(entry.page_table, inputs.slots, page_size=size, offloaded=key.offloaded, positions=inputs.starts)

    def run(self, plan: StepPlan, key: GraphKey, rows: SampleRows | None) -> DecodeOutputs:
        """Replay the step; ``rows`` say what sampling after the graph does, None where the highest logits are all that is wanted."""
        captured = self._get(key)
        self._layout.pack(self._lanes.take(), plan, rows, key.batch)
        captured.replay()
        return DecodeOutputs(n=plan.n_rows, tokens=self._lanes.launched(plan.n_rows), captured=captured)


def _edges(streams: Streams) -> Any:
    """The module with the two ends of a step: kernels on CUDA where Triton is installed."""
    return kernels_or_twin(".kernels.step_edges", __package__, cuda=streams.cuda)


def _span(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)" if len(sizes) > 1 else str(sizes[0])


def _device_bytes(streams: Streams) -> int:
    """Device memory in use; graphs hold some that torch does not count."""
    if not streams.cuda:
        return 0
    free, total = torch.cuda.mem_get_info(streams.device)
    return total - free
