"""One rank of the engine: it puts the parts together, runs calls, and reports."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..parallel.agree import together
from ..parallel.debug import debugging
from ..parallel.grid import Grid
from ..parallel.mailbox import Mailbox
from .announcement import announce
from .assembly import fill_weights, make_cache, make_offload, make_runner, make_scheduler
from .call import Params, Prompt
from .config import EngineConfig, check_config
from .driver import Driver, protected
from .eplb.location import check_file
from .eplb.make import make_experts
from .facts import startup_facts
from .front import Front, StreamChunk
from .grammar.offline import Grammars
from .hf_config.model_parser import parse_model_config
from .host_memory import keep_freed_memory
from .leader import Leader
from .messages import Refusal
from .model_config import ModelConfig
from .models.build import Stage, build_stage
from .models.skeleton import expert_ranks
from .rank_row import rank_row
from .resolved import grid_spec, resolve_device, resolve_dtype, resolve_max_len
from .runner import Runner
from .sharing.make import make_share
from .sharing.place import Membership
from .step_ranges import StepRanges, nvtx_mark
from .text.chat import render_chat
from .text.tokenizer import Tokenizer
from .warm_up import warm_up
from .weights.hub import SHAPES, resolve_model

log = logging.getLogger("rorqual")


class Engine:
    """What one rank holds. Making it, ``run`` and ``stats`` are collective over all ranks."""

    grid: Grid  # this rank's place
    stage: Stage  # its part of the model
    runner: Runner  # runs steps
    leader: Leader | None  # on the first rank of each replica
    front: Front | None  # on rank 0

    def __init__(self, config: EngineConfig) -> None:
        with Grid.declining():
            device = self._read(config)
        facts = startup_facts(config, self.folder, device.type)
        self.grid = Grid.create(grid_spec(config), device, config.dist_timeout, facts=facts, max_skew_s=config.max_clock_skew)
        with protected(self.grid, close=True):
            self._make()
        self._run_seconds = 0.0

    def _read(self, config: EngineConfig) -> torch.device:
        """Settings and the model's files, without the other ranks."""
        check_config(config)
        if config.model in SHAPES and config.load_format != "dummy":
            raise ValueError(f"model {config.model!r} is a configuration without weights; add --load-format dummy")
        self.config = config
        self.debug = debugging()
        self._in_call = self._closed = False
        self._broken = ""  # the error that ended a call in its middle
        device = resolve_device(config.device)
        if device.type == "cpu":
            keep_freed_memory()
        self.folder: Path = resolve_model(config.model, config.revision)
        self.model_config: ModelConfig = parse_model_config(self.folder)
        self.max_model_len = resolve_max_len(config, self.model_config)
        self.dtype = resolve_dtype(config, self.model_config)
        no_text = config.skip_tokenizer_init or (config.model in SHAPES and config.tokenizer is None)
        self.tokenizer = None if no_text else Tokenizer.load(self.tokenizer_folder())
        return device

    def _make(self) -> None:
        """Model, weights, cache, runner and, where this rank leads, the scheduler."""
        config, model, grid = self.config, self.model_config, self.grid
        together(grid, lambda: check_file(config, model, expert_ranks(config, grid.spec)))
        self.stage = together(grid, lambda: build_stage(model, config, grid, self.dtype))
        progress = grid.rank == 0 and not config.disable_log_stats
        report = together(grid, lambda: fill_weights(self.stage, self.folder, config, model, progress=progress))
        self.experts = make_experts(grid, self.stage, config, model)
        pools = make_offload(grid, self.stage, config, model, self.dtype, self.max_model_len, self.folder)
        cache = pools.cache if pools is not None else make_cache(grid, self.stage, config, model, self.dtype, self.max_model_len)
        self._host_pool = None if pools is None else pools.host
        self._membership = None if pools is None else pools.membership
        self.runner = make_runner(grid, self.stage, cache, config, self.dtype, self.max_model_len, debug=self.debug, pools=pools)
        self.runner.experts = self.experts
        if config.enable_layerwise_nvtx_tracing:
            self.runner.trace = StepRanges(self.stage.model, nvtx_mark(grid.device))
        if config.cuda_graph_capture == "start":
            together(grid, self.runner.capture_graphs)
        plans = Mailbox(grid.replica)
        self.leader = self.front = None
        if grid.is_leader:
            share = make_share(config, pools, self.runner.mover, debug=self.debug)
            scheduler = make_scheduler(config, model, n_pages=cache.n_pages, max_len=self.max_model_len, pools=pools, share=share)
            self.leader = Leader(
                grid=grid, scheduler=scheduler, runner=self.runner, tokenizer=self.tokenizer, plans=plans, vocab_size=model.vocab_size
            )
        if grid.rank == 0:
            grammars = None if self.tokenizer is None else Grammars(self.tokenizer, model.vocab_size, model.eos_token_ids)
            self.front = Front(tokenizer=self.tokenizer, dp=grid.spec.dp, vocab_size=model.vocab_size, grammars=grammars)
            if not config.disable_log_stats:
                announce(config, grid, self.stage, self.runner, pools, report)
        self.driver = Driver(grid=grid, runner=self.runner, plans=plans, leader=self.leader, front=self.front, debug=self.debug)

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer and the chat template are."""
        return self.folder if self.config.tokenizer is None else resolve_model(self.config.tokenizer, self.config.revision)

    def run(self, prompts: Sequence[Prompt], params: Params, priority: Sequence[int] | None) -> Iterator[StreamChunk]:
        """Run one call to its end (see ``Driver.run``).

        Raises:
            ValueError: the engine is closed, an earlier call ended in its middle, or another call has not ended. The latter may be
                so on rank 0 alone, whose stream was left open: it ends all ranks.
        """
        self._check_not_closed()
        if self._broken:  # some of its requests would mix with those of another
            raise ValueError(f"an earlier call of this LLM ended in its middle ({self._broken}); close it and make another")
        self._check_no_call()
        start, self._in_call = time.monotonic(), True
        try:
            yield from self.driver.run(prompts, params, priority)
        except (GeneratorExit, Refusal):
            raise
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._in_call = False
            self._run_seconds += time.monotonic() - start

    def warm_up(self) -> float:
        """Compile the kernels of prompts of all lengths, by steps on padding. Collective; seconds it took.

        Raises:
            ValueError: the engine is closed, or a call has not ended.
        """
        self._check_not_closed()
        self._check_no_call()
        start = time.monotonic()
        if self.stage.attention_ops is not None or self.stage.moe_ops is not None:  # else nothing is compiled
            with protected(self.grid):
                warm_up(self.runner, most_tokens=self.config.max_num_batched_tokens, max_len=self.max_model_len)
        return time.monotonic() - start

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ValueError("this LLM is closed; make another")

    def _check_no_call(self) -> None:
        with protected(self.grid, shared=Refusal):  # the other ranks may not know of the stream
            if self._in_call:
                raise ValueError("another call has not ended; read its stream to the end, or close it, before the next call")

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **template_args: Any) -> list[int]:
        """One conversation as token ids.

        Raises:
            ValueError: no tokenizer, no known chat format, or messages it cannot render.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; leave out skip_tokenizer_init")
        text = render_chat(self.tokenizer_folder(), messages, model_type=self.model_config.model_type, **template_args)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def rank_stats(self) -> dict[str, Any]:
        """This rank's counters."""
        return rank_row(self.grid, self.stage, self.runner, self.leader, self.experts)

    def stats(self) -> dict[str, Any]:
        """Counters of every rank, on rank 0 (collective); {} elsewhere. ``expert_load`` sums all ranks.

        Raises:
            ValueError: the engine is closed.
        """
        self._check_not_closed()
        mine = json.dumps(self.rank_stats()).encode()
        world = self.grid.world
        if world.index != 0:
            world.send_bytes(mine, 0)
            return {}
        rows = [json.loads(mine)] + [json.loads(world.recv_bytes(r)) for r in range(1, world.size)]
        loads = [torch.tensor(r["expert_load"]) for r in rows if "expert_load" in r]
        total = torch.stack(loads).sum(0).tolist() if loads else []
        return {"ranks": rows, "seconds": self._run_seconds, "expert_load": total}

    def dump_experts(self, path: str) -> None:
        """Write the recorded load of experts (see ``ExpertSteps.dump``). Collective.

        Raises:
            ValueError: the engine is closed, or nothing is recorded.
        """
        self._check_not_closed()
        if self.experts is None or self.config.expert_distribution_recorder_mode is None:
            raise ValueError("no load of experts is recorded; set expert_distribution_recorder_mode, for example to stat")
        self.experts.dump(path)

    def close(self) -> None:
        """Write what was recorded, release dispatcher, host pool and groups, each even if another fails; nothing the second time.

        Raises:
            RuntimeError: with offloading, a step read a row that was never written, or the device has failed.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:  # the last one first
            ends.callback(self.grid.close)
            if self._host_pool is not None:
                ends.callback(self._host_pool.close)
                if self._membership is not None:
                    ends.callback(self._leave_directory, self._membership)
                ends.callback(self._finish_tiers)
            if self.stage.dispatcher is not None:
                ends.callback(self.stage.dispatcher.close)
            if self.experts is not None:
                ends.callback(self.experts.finish, self.config.expert_distribution_dump)

    def _leave_directory(self, membership: Membership) -> None:
        """Publish what is left, say what came of it, and leave."""
        share = None if self.leader is None else self.leader.scheduler.share
        if share is not None:
            share.close()
            if not self.config.disable_log_stats:
                log.info("rank %d, prefix directory: %s", self.grid.rank, ", ".join(f"{n} {k}" for k, n in share.stats().items()))
        membership.close()

    def _finish_tiers(self) -> None:
        """Look at the tiers' counters a last time, and wait until the device has done with the host pool."""
        world, mover = self.grid.world, self.runner.mover
        try:
            if mover is not None:
                with self.grid.progress.waiting(world.name, "counters of the device", world.ranks):  # the watchdog's deadline covers it
                    if not self.config.disable_log_stats:
                        log.info("rank %d, %s", self.grid.rank, mover.counts.summary())
                    mover.counts.verify()
        finally:
            with self.grid.progress.waiting(world.name, "end of the device's work", world.ranks):
                self.runner.streams.settle()
