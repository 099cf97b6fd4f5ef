"""One rank of the engine: it puts model, cache, tables, scheduler and loop together and runs calls."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..attention.kv.cache import KVCache, kv_bytes_per_token
from ..parallel.agree import together
from ..parallel.grid import Grid, GridSpec
from ..parallel.mailbox import Mailbox
from ..parallel.watchdog import guard
from .chat import render_chat
from .config import EngineConfig
from .follower import follow
from .front import Front, Prompt, StreamChunk
from .host_memory import keep_freed_memory
from .leader import Leader
from .memory import check_config, free_bytes, pool_pages
from .messages import Command, Fail
from .model_config import ModelConfig
from .model_parser import parse_model_config
from .models.build import Stage, build_stage
from .models.targets import is_known
from .runner import Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerConfig
from .tables import DeviceTables
from .tokenizer import Tokenizer
from .weights.dummy import fill_dummy
from .weights.hub import resolve_model
from .weights.loader import LoadReport, load_weights

log = logging.getLogger("rorqual")


def resolve_device(name: str) -> torch.device:
    """'auto', 'cpu' or 'cuda' as this rank's device.

    Raises:
        ValueError: CUDA was asked for and is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu, or install a CUDA build of torch")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


class Engine:
    """What one rank holds. ``run`` is collective: every rank calls it with its prompts, rank 0's count."""

    def __init__(self, config: EngineConfig) -> None:
        check_config(config)
        self.config = config
        self.debug = os.environ.get("RORQUAL_DEBUG", "0") not in ("", "0")
        spec = GridSpec(
            pp=config.pipeline_parallel_size,
            dp=config.data_parallel_size,
            tp=config.tensor_parallel_size,
            ranks_per_node=config.ranks_per_node,
        )
        device = resolve_device(config.device)
        if device.type == "cpu":
            keep_freed_memory()
        self.folder: Path = resolve_model(config.model, config.revision)
        self.model_config: ModelConfig = parse_model_config(self.folder)
        self.max_model_len = self._max_model_len()
        self.dtype = self._dtype()
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.load(self._tokenizer_folder())
        self.grid = Grid.create(spec, device, config.dist_timeout)
        self.plans = Mailbox(self.grid.replica)
        self._commands: list[Command] = []
        self._run_seconds = 0.0
        with self._protected(close=True):
            self.stage: Stage = together(self.grid, lambda: build_stage(self.model_config, config, self.grid, self.dtype))
            self.load_report: LoadReport | None = together(self.grid, self._load)
            self.runner, n_pages = self._make_runner()
            self.leader: Leader | None = self._make_leader(n_pages) if self.grid.is_leader else None
            self.front: Front | None = None
            if self.grid.rank == 0:
                self.front = Front(tokenizer=self.tokenizer, dp=spec.dp, vocab_size=self.model_config.vocab_size)
                self._announce(n_pages)

    @contextmanager
    def _protected(self, *, close: bool = False) -> Iterator[None]:
        """An error inside ends all ranks at once, unless every rank has it (ValueError) or the caller stopped early."""
        try:
            yield
        except ValueError:
            if close:
                self.grid.close()
            raise
        except GeneratorExit:
            raise
        except BaseException:
            with guard(self.grid):
                raise

    def _announce(self, n_pages: int) -> None:
        """Say once what was made."""
        if self.config.disable_log_stats:
            return
        if self.grid.spec.world > 1:
            log.info("%s", self.grid.summary())
        if self.load_report is not None:
            log.info("%s", self.load_report.summary())
        tokens = n_pages * self.config.page_size
        log.info(
            "KV pool: %d pages of %d tokens, %d bytes a token and stage", n_pages, self.config.page_size, self.runner.cache.bytes_per_token
        )
        log.info("longest request %d tokens; %d of them fit at once", self.max_model_len, tokens // self.max_model_len)

    # ---- making

    def _max_model_len(self) -> int:
        limit, asked = self.model_config.max_position, self.config.max_model_len
        if asked is not None and asked > limit:
            raise ValueError(f"max_model_len {asked} is more than the model's {limit} positions; use at most {limit}")
        return asked or limit

    def _dtype(self) -> torch.dtype:
        name = self.model_config.dtype if self.config.dtype == "auto" else self.config.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def _tokenizer_folder(self) -> Path:
        return self.folder if self.config.tokenizer is None else resolve_model(self.config.tokenizer, self.config.revision)

    def _load(self) -> LoadReport | None:
        if self.config.load_format == "dummy":
            fill_dummy(self.stage.targets, self.config.seed)
            return None
        return load_weights(
            self.stage.targets,
            self.folder,
            model=self.model_config,
            known=lambda name: is_known(name, self.model_config),
            progress=self.grid.rank == 0 and not self.config.disable_log_stats,
        )

    def _make_runner(self) -> tuple[Runner, int]:
        config, mla = self.config, self.model_config.attention
        kinds = () if mla.indexer is None else mla.indexer.layer_types
        has_indexer = [mla.indexer is not None and (not kinds or kinds[i] == "full") for i in self.stage.layers]
        kv_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else str(self.dtype).removeprefix("torch.")
        kv_dtype = "bfloat16" if kv_dtype == "float16" else kv_dtype
        per_token = kv_bytes_per_token(mla, has_indexer, kv_dtype)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = free_bytes(self.grid.device, config, local)
        pages = together(
            self.grid, lambda: pool_pages(config, max_model_len=self.max_model_len, bytes_per_token=per_token, available=available)
        )
        pages = int(self.grid.world.gather_ints([pages]).min())
        cache = KVCache(mla, has_indexer, pages, config.page_size, kv_dtype, self.dtype, self.grid.device)
        tables = DeviceTables(
            max_num_seqs=config.max_num_seqs,
            max_len=self.max_model_len,
            page_size=config.page_size,
            dummy_page=pages,
            device=self.grid.device,
        )
        if self.debug:
            cache.poison(range(pages))
        runner = Runner(
            grid=self.grid,
            stage=self.stage,
            cache=cache,
            tables=tables,
            page_size=config.page_size,
            hidden=self.model_config.hidden,
            dtype=self.dtype,
            debug=self.debug,
        )
        return runner, pages

    def _make_leader(self, n_pages: int) -> Leader:
        config = self.config
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                page_size=config.page_size,
                n_pages=n_pages,
                max_model_len=self.max_model_len,
                pp=config.pipeline_parallel_size,
                overlap=not config.disable_overlap_schedule,
                prefix_caching=config.enable_prefix_caching,
                eos_token_ids=self.model_config.eos_token_ids,
                seed=config.seed,
            )
        )
        lag = config.pipeline_parallel_size - 1 + (0 if config.disable_overlap_schedule else 1)
        return Leader(grid=self.grid, scheduler=scheduler, runner=self.runner, tokenizer=self.tokenizer, lag=lag, plans=self.plans)

    # ---- running

    def run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priorities: Sequence[int]) -> Iterator[StreamChunk]:
        """Run one call to its end. Rank 0 yields what is new; the other ranks work and yield nothing.

        Raises:
            ValueError: on every rank, when rank 0's prompts are refused.
        """
        start = time.monotonic()
        try:
            with self._protected():
                if self.leader is None:
                    follow(self.plans, self.runner)
                elif self.front is None:
                    self._lead_others()
                else:
                    yield from self._lead_front(prompts, params, priorities)
        finally:
            self._run_seconds += time.monotonic() - start

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priorities: Sequence[int]) -> list[Command]:
        assert self.front is not None and self.leader is not None
        adds = self.front.submit(prompts, params, priorities)
        try:
            for add in adds:
                self.leader.scheduler.validate(add.request())
        except ValueError:
            self.front.withdraw(adds)
            raise
        return list(adds)

    def _lead_front(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priorities: Sequence[int]) -> Iterator[StreamChunk]:
        front, leader = self.front, self.leader
        assert front is not None and leader is not None
        try:
            self._commands = self._submit(prompts, params, priorities)
        except ValueError as error:
            self._refuse(str(error))
            raise
        done = False
        try:
            while not done:
                events, done = self._tick()
                yield from front.chunks(events)
        except GeneratorExit:  # the caller stopped early: end what runs, then let the other ranks go
            self._commands.extend(front.aborts())
            while not done:
                events, done = self._tick()
                for _ in front.chunks(events):
                    pass
            self._end()
            raise
        self._end()

    def _tick(self) -> tuple[list[Any], bool]:
        assert self.front is not None and self.leader is not None
        commands, self._commands = self._commands, []
        return self.leader.tick(commands, more=bool(self._commands) or self.front.open)

    def _lead_others(self) -> None:
        assert self.leader is not None
        done = False
        try:
            while not done:
                _, done = self.leader.tick([], more=False)
        except ValueError as error:
            self.leader.stop_followers(str(error))
            raise
        self._end()

    def _refuse(self, message: str) -> None:
        """Carry rank 0's refusal to every rank."""
        assert self.leader is not None
        if self.grid.spec.dp > 1:
            try:
                self.leader.tick([Fail(message=message)], more=True)
            except ValueError:
                pass
        self.leader.stop_followers(message)

    def _end(self) -> None:
        assert self.leader is not None
        self.leader.stop_followers()
        self.runner.drain()
        if self.debug:
            self.leader.scheduler.check()

    def abort(self, request_id: str | None = None) -> None:
        """Abort one request of the running call, or all (rank 0)."""
        if self.front is not None:
            self._commands.extend(self.front.aborts(request_id))

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **template_args: Any) -> list[int]:
        """One conversation as token ids.

        Raises:
            ValueError: no tokenizer, no known chat format, or messages it cannot render.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; leave out skip_tokenizer_init")
        text = render_chat(self._tokenizer_folder(), messages, model_type=self.model_config.model_type, **template_args)
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ---- reporting

    def rank_stats(self) -> dict[str, Any]:
        """This rank's counters."""
        grid, stats = self.grid, self.runner.stats
        row: dict[str, Any] = {"rank": grid.rank, "pp": grid.pp_rank, "dp": grid.dp_rank, "tp": grid.tp_rank}
        row |= {"layers": [self.stage.layers.start, self.stage.layers.stop], "tokens": stats.tokens, "samples": stats.samples}
        row |= {"steps": stats.steps, "idle_steps": stats.idle_steps, "busy_seconds": stats.busy_seconds}
        row["intervals"] = list(stats.intervals)
        if self.stage.placement is not None and self.stage.load is not None:
            row["experts"] = self.stage.placement.slots_per_rank
            row["expert_load"] = self.stage.load.counts.tolist()
        if self.stage.dispatcher is not None:
            row["dispatch_bytes"] = self.stage.dispatcher.bytes_sent()
        if self.leader is not None:
            row["scheduler"] = self.leader.stats()
        return row

    def stats(self) -> dict[str, Any]:
        """Counters of every rank, on rank 0 (collective); {} elsewhere. ``expert_load`` sums all ranks."""
        mine = json.dumps(self.rank_stats()).encode()
        world = self.grid.world
        if world.index != 0:
            world.send_bytes(mine, 0)
            return {}
        rows = [json.loads(mine)] + [json.loads(world.recv_bytes(r)) for r in range(1, world.size)]
        loads = [torch.tensor(r["expert_load"]) for r in rows if "expert_load" in r]
        total = torch.stack(loads).sum(0).tolist() if loads else []
        return {"ranks": rows, "seconds": self._run_seconds, "expert_load": total}

    def close(self) -> None:
        """Release dispatcher and groups."""
        if self.stage.dispatcher is not None:
            self.stage.dispatcher.close()
        self.grid.close()
