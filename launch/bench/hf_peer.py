"""The peer: ``transformers`` generate() on the same requests, in the fastest of its batched modes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .datasets.request import Request

#: new tokens of a trial run
TRIAL_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How generate() is run: greedy, in left-padded static batches."""

    attention: str  # attn_implementation
    experts: str  # experts_implementation
    cache: str  # "dynamic" or "static"
    threads: int  # torch threads; 0 leaves them alone (GPU)
    batch: int  # requests of one call

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.attention} attention, {self.experts} experts, {self.cache} cache, {self.threads} threads"


def axes(n_requests: int, device: str, threads: int) -> dict[str, list[Any]]:
    """What is tried for every part of a mode, in the order of trying."""
    batches = sorted({min(n_requests, b) for b in (n_requests, 128, 64, 32, 16, 8)}, reverse=True)
    return {
        "attention": ["sdpa", "eager"],
        "experts": ["grouped_mm", "batched_mm", "eager"],
        "cache": ["dynamic", "static"],
        "threads": sorted({1, threads}, reverse=True) if device == "cpu" else [0],
        "batch": batches,
    }


def search(choices: dict[str, list[Any]], measure: Callable[[Mode], float]) -> list[tuple[Mode, float]]:
    """Climb to a fast mode, one axis at a time, until a round over all axes finds nothing better.

    Args:
        measure: tokens/s of a mode, 0 when it does not work.

    Returns:
        Every mode that was measured, fastest first.
    """
    best = Mode(**{name: values[0] for name, values in choices.items()})
    tried = {best: measure(best)}
    before = None
    while best != before:
        before = best
        for name, values in choices.items():
            for mode in [replace(best, **{name: value}) for value in values]:
                if mode not in tried:
                    tried[mode] = measure(mode)
            best = max(tried, key=lambda mode: tried[mode])
    return sorted(tried.items(), key=lambda item: -item[1])


class Peer:
    """A model of transformers and the requests it must complete."""

    def __init__(self, folder: Path, requests: Sequence[Request], *, dtype: str, device: str, say: Callable[[str], None]) -> None:
        # equal lengths side by side: least padding, and no row of a batch waits for a longer one
        self.requests = sorted(requests, key=lambda r: (r.output_len, len(r.token_ids)))
        self._folder = folder
        self._dtype = getattr(torch, dtype)
        self._device = device
        self._say = say
        self._model: Any = None
        self._loaded: tuple[str, str] | None = None

    def _prepare(self, mode: Mode) -> Any:
        from transformers import AutoModelForCausalLM

        if mode.threads:
            torch.set_num_threads(mode.threads)
        if self._loaded != (mode.attention, mode.experts):
            self._model = None
            self._model = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=self._dtype, attn_implementation=mode.attention, experts_implementation=mode.experts
            )
            self._model.to(self._device).eval()
            self._loaded = (mode.attention, mode.experts)
        return self._model

    @torch.inference_mode()
    def _generate(self, mode: Mode, batch: Sequence[Request], new: int) -> None:
        width = max(len(r.token_ids) for r in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        cache = {} if mode.cache == "dynamic" else {"cache_implementation": mode.cache}
        out = self._prepare(mode).generate(
            ids.to(self._device), attention_mask=mask.to(self._device), do_sample=False, max_new_tokens=new, min_new_tokens=new,
            eos_token_id=None, pad_token_id=0, **cache,
        )  # fmt: skip
        if out.shape[1] != width + new:
            raise RuntimeError(f"generate() made {out.shape[1] - width} tokens instead of {new}")

    def trial(self, mode: Mode) -> float:
        """Output tokens/s of one batch and a few tokens, after a warm-up; 0 when the mode does not work."""
        batch = self.requests[-mode.batch :]
        new = min(TRIAL_TOKENS, batch[-1].output_len)
        try:
            self._generate(mode, batch, 2)
            start = time.monotonic()
            self._generate(mode, batch, new)
        except Exception as error:  # a mode that this model or device does not support is no mode to compare with
            self._say(f"transformers, {mode}: does not work here ({' '.join(str(error).split())[:160]})")
            return 0.0
        rate = new * len(batch) / (time.monotonic() - start)
        self._say(f"transformers, {mode}: {rate:.1f} output tokens/s in a trial")
        return rate

    def full(self, mode: Mode) -> float:
        """Seconds for all requests."""
        self._generate(mode, self.requests[-mode.batch :], 2)
        start = time.monotonic()
        for first in range(0, len(self.requests), mode.batch):
            batch = self.requests[first : first + mode.batch]
            self._generate(mode, batch, batch[-1].output_len)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - start


def _quiet(logging: Any) -> None:
    """Keep transformers' own messages and bars out of the output."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_peer(
    folder: Path, requests: Sequence[Request], *, dtype: str, device: str, threads: int, finalists: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Find the fastest modes in trials, run the best ``finalists`` of them in full, and report the fastest.

    Raises:
        ValueError: transformers is missing, or no mode works.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("comparing with transformers needs it installed: pip install 'rorqual[dev]'") from None
    _quiet(transformers.logging)
    before = torch.get_num_threads()
    peer = Peer(folder, requests, dtype=dtype, device=device, say=say)
    try:
        tried = search(axes(len(requests), device, threads), peer.trial)
        working = [mode for mode, rate in tried if rate > 0]
        if not working:
            raise ValueError("transformers generate() works in no mode for this model; see the messages above")
        runs = [(peer.full(mode), mode) for mode in working[:finalists]]
    finally:
        torch.set_num_threads(before)
    seconds, mode = min(runs, key=lambda item: item[0])
    return {"seconds": seconds, "mode": asdict(mode), "modes_tried": len(tried), "version": transformers.__version__}


def run_peer_apart(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """``run_peer`` in a process of its own: nothing that the engine set up helps or hinders it. ``say`` must be importable."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_peer, *args, **kwargs).result()
