"""The engine's loop around a model of integer arithmetic: exact on every device and batch, and a token depends on all before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rorqual import SamplingParams
from rorqual.attention.batch import AttentionBatch
from rorqual.engine.driver import Driver
from rorqual.engine.front import Front
from rorqual.engine.graph_key import context_classes
from rorqual.engine.graphs import DecodeGraphs
from rorqual.engine.leader import Leader
from rorqual.engine.runner import Runner
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.staging import Staging
from rorqual.engine.streams import Streams
from rorqual.engine.tables import DeviceTables
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.mailbox import Mailbox

VOCAB = 128


class StubModel(nn.Module):
    """Caches a number per token; a token's state is a weighted sum over its context, its logits are distinct numbers made of it."""

    def __init__(self, device: torch.device, *, burn: int = 0, width: int = 1024) -> None:
        super().__init__()
        self.burn = burn  # matrix products that take time and change nothing
        self.weight = nn.Parameter(torch.zeros(width, width, device=device), requires_grad=False)
        self.calls: list[tuple[int, bool]] = []  # (tokens, static batch) of every call

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None] + torch.zeros(2, dtype=torch.int64, device=ids.device)

    def forward(self, x: torch.Tensor, batch: AttentionBatch, cache: StubCache, shared: Any) -> tuple[torch.Tensor, None]:
        self.calls.append((x.shape[0], batch.n_valid is not None))
        cache.rows[batch.write_rows] = x[:, 0] * 31 + batch.positions
        every = torch.arange(max(1, batch.max_context), device=x.device)
        pages = batch.page_table[batch.token_row].long()[:, every // batch.page_size]
        values = cache.rows[pages * batch.page_size + every % batch.page_size]
        state = torch.where(every <= batch.positions[:, None], values * (every * 7 + 3), 0).sum(1) & 0xFFFFF
        y = self.weight
        for _ in range(self.burn):
            y = y @ self.weight
        return torch.stack([state, state], 1), None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        v = torch.arange(VOCAB, device=x.device)
        hashed = ((x[:, :1] * (2 * v + 1) * 40503) >> 3) % 9973
        return (hashed * VOCAB + v).float()


class StubCache:
    """One number per token."""

    def __init__(self, n_pages: int, page_size: int, device: torch.device) -> None:
        self.n_pages, self.page_size, self.dummy_page = n_pages, page_size, n_pages
        self.rows = torch.full(((n_pages + 1) * page_size,), -(10**9), dtype=torch.int64, device=device)

    def poison(self, pages: Any) -> None:
        self.rows.view(-1, self.page_size)[torch.as_tensor(pages, device=self.rows.device).long()] = -(10**9)


class FakeStreams(Streams):
    """ "Captures" on the CPU: a replay runs the body again into the tensors of the capture, and spoils those of the other graphs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.captured: list[tuple[torch.Tensor, ...]] = []
        self.replays = 0

    def capture(self, body):
        body()
        results = tuple(x.clone() for x in body())
        self.captured.append(results)

        def replay() -> None:
            self.replays += 1
            for other in self.captured:
                for x in other:
                    x.fill_(77)
            for x, new in zip(results, body(), strict=True):
                x.copy_(new)

        return replay, results


class StubEngine:
    """One rank. ``sizes`` are the graphs' batch sizes, None for no graphs."""

    def __init__(
        self, device: str = "cpu", *, sizes: tuple[int, ...] | None = None, dp: int = 1, lazy: bool = False, debug: bool = False,
        burn: int = 0, max_len: int = 64, dense: int = 8, n_pages: int = 400, page_size: int = 4, max_num_seqs: int = 8, **scheduler: Any,
    ) -> None:  # fmt: skip
        where = torch.device(device)
        self.grid = Grid.create(GridSpec(dp=dp), where, 60.0)
        self.streams = FakeStreams(where) if where.type == "cpu" else Streams(where)
        self.model, self.cache = StubModel(where, burn=burn), StubCache(n_pages, page_size, where)
        self.tables = DeviceTables(
            max_num_seqs=max_num_seqs, max_len=max_len, page_size=page_size, dummy_page=n_pages, device=where, staging=Staging(self.streams)
        )
        self.graphs = None
        if sizes is not None:
            self.graphs = DecodeGraphs(
                model=self.model, cache=self.cache, tables=self.tables, page_size=page_size, streams=self.streams,
                sizes=sizes, contexts=context_classes(max_len, dense),
            )  # fmt: skip
        stage: Any = SimpleNamespace(model=self.model, layers=range(1), capturable=where.type == "cuda" or sizes is not None)
        self.runner = Runner(
            grid=self.grid, stage=stage, cache=self.cache, tables=self.tables, dtype=torch.int64, debug=debug, graphs=self.graphs
        )
        if not lazy:
            self.runner.capture_graphs()
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, page_size=page_size, n_pages=n_pages, max_model_len=max_len,
            **{"max_num_batched_tokens": 64, **scheduler},
        )  # fmt: skip
        plans = Mailbox(self.grid.replica)
        self.leader = Leader(grid=self.grid, scheduler=Scheduler(config), runner=self.runner, tokenizer=None, plans=plans)
        self.front = Front(tokenizer=None, dp=dp, vocab_size=VOCAB) if self.grid.rank == 0 else None
        self.driver = Driver(grid=self.grid, runner=self.runner, plans=plans, leader=self.leader, front=self.front, debug=True)

    def outputs(self, prompts: list[list[int]], params: Any) -> list[Any]:
        found = {c.prompt_index: c.output for c in self.driver.run(prompts, params, None) if c.output is not None}
        return [found[i] for i in sorted(found)]

    def tokens(self, prompts: list[list[int]], params: Any = None) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in self.outputs(prompts, params or greedy())]


def greedy(n: int = 16, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True, **changes})


def prompts(count: int, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def mixed_params(count: int, n: int = 16) -> list[SamplingParams]:
    """Greedy, drawn, penalised, banned, scored and biased requests in turn."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.4},
        {"min_tokens": 6, "stop_token_ids": [3, 4, 5], "ignore_eos": False},
        {"logprobs": 3}, {"prompt_logprobs": 2}, {"temperature": 1.1, "top_k": 5, "seed": 1, "frequency_penalty": 0.5},
        {"logit_bias": {2: 3.0, 9: -100.0}},
    ]  # fmt: skip
    return [greedy(n - i % 5, **kinds[i % len(kinds)]) for i in range(count)]
