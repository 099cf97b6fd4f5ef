"""Indexer logits: decode over long contexts, prefill against 64k keys. Peers: DeepGEMM, and for FP4 keys the kernel over FP8 keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any

import torch

from ....attention.kernels.indexer_logits_schedule import VARIANTS, kind
from .case import Call, Case, Runs, Target

HEADS, WIDTH, PAGE = 64, 128, 64
_FP8, _FP4 = 132, 68  # bytes of a key
_CACHE_BYTES = 200e6  # inputs are repeated until they are well past the L2


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Requests of equal length, pages at random places of the pool."""

    q: torch.Tensor
    weights: torch.Tensor
    pool: torch.Tensor
    page_table: torch.Tensor
    token_row: torch.Tensor
    limit: torch.Tensor
    out: torch.Tensor
    context: int
    query: int

    def ours(self, config: dict[str, Any] | None = None) -> torch.Tensor:
        """One call of our operation."""
        from ....attention.kernels.indexer_logits import indexer_logits

        tensors = (self.q, self.weights, self.pool, self.page_table, self.token_row, self.limit)
        return indexer_logits(*tensors, page_size=PAGE, max_context=self.context, max_query=self.query, out=self.out, config=config)


def cases() -> list[Case]:
    """Decode B x L with one token a request, then two; prefill T x L of one request."""
    decode = [(1, 131072, 1), (8, 65536, 1), (8, 131072, 1), (32, 65536, 1), (64, 32768, 1), (64, 131072, 1), (32, 65536, 2)]
    halves = [(1, 65536, 1), (1, 131072, 1), (16, 65536, 1), (64, 131072, 1), (32, 65536, 2)]
    fp8 = [_decode(*shape) for shape in decode] + [_prefill(2048, 65536), _prefill(8192, 65536)]
    return fp8 + [_decode(*shape, _FP4) for shape in halves] + [_prefill(2048, 65536, _FP4)]


def _decode(batch: int, context: int, query: int, key: int = _FP8) -> Case:
    name = f"decode {batch}x{context // 1024}k" + (f", {query} tokens a request" if query > 1 else "")
    target = Target(roof=0.8) if batch * context >= 2**21 else Target(peer="deep_gemm")
    return Case(
        op=_op(key),
        name=name,
        params={"batch": batch, "context": context, "query": query, "heads": HEADS},
        build=partial(_build_decode, batch, context, query, key),
        n_bytes=batch * context * (key + 4 * query),
        flops=2.0 * HEADS * WIDTH * batch * query * context,
        unit="fp8",
        target=target if key == _FP8 else Target(peer="fp8 keys"),
        tune_shape={"tokens": batch * query, "kind": kind(HEADS, query)},
    )


def _op(key: int) -> str:
    return "indexer_logits" if key == _FP8 else "indexer_logits_fp4"


def _prefill(tokens: int, context: int, key: int = _FP8) -> Case:
    return Case(
        op=_op(key),
        name=f"prefill {tokens}x{context // 1024}k",
        params={"tokens": tokens, "context": context, "heads": HEADS},
        build=partial(_build_prefill, tokens, context, key),
        n_bytes=key * context + 4.0 * tokens * context,
        flops=2.0 * HEADS * WIDTH * tokens * context,
        unit="fp8",
        graph=False,
        target=Target(peer="deep_gemm", ratio=0.55) if key == _FP8 else Target(peer="fp8 keys", ratio=1 / 1.3),
        tune_shape={"tokens": tokens, "kind": kind(HEADS, tokens)},
    )


def _pool(n_pages: int, key: int) -> torch.Tensor:
    """Random keys."""
    if key == _FP4:
        pool = torch.randint(0, 256, (n_pages, PAGE * _FP4), dtype=torch.uint8, device="cuda")
        words = pool[:, PAGE * WIDTH // 2 :].view(torch.int32)
        scales = torch.rand(words.shape, device="cuda").mul_(0.015).add_(0.005).view(torch.int32)
        words.bitwise_and_(0x1111).bitwise_or_(scales & -65536)  # the two largest multipliers, as keys of one size have them
        return pool
    pool = torch.empty(n_pages, PAGE * _FP8, dtype=torch.uint8, device="cuda")
    for first in range(0, n_pages, 65536):
        part = pool[first : first + 65536]
        keys = torch.randn(len(part), PAGE * WIDTH, device="cuda", dtype=torch.bfloat16)
        part[:, : PAGE * WIDTH] = (keys * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        part[:, PAGE * WIDTH :].view(torch.float32).uniform_(0.005, 0.02)
    return pool


def _inputs(batch: int, context: int, query: int, key: int = _FP8) -> Inputs:
    pages = context // PAGE
    n_pages, tokens = batch * pages, batch * query
    return Inputs(
        q=torch.randn(tokens, HEADS, WIDTH, device="cuda").mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn),
        weights=torch.randn(tokens, HEADS, device="cuda"),
        pool=_pool(n_pages, key),
        page_table=torch.randperm(n_pages, device="cuda").view(batch, pages).to(torch.int32),
        token_row=torch.arange(batch, device="cuda", dtype=torch.int32).repeat_interleave(query),
        limit=torch.full((tokens,), context, device="cuda", dtype=torch.int32),
        out=torch.empty(tokens, context, device="cuda"),
        context=context,
        query=query,
    )


def _check(ours: Inputs) -> None:
    """Some tokens against the fp64 formula."""
    from ....attention.kernels.indexer_logits_torch import fill

    ours.out.fill_(float("nan"))
    ours.ours()
    for token in {0, len(ours.q) // 2, len(ours.q) - 1}:
        one = slice(token, token + 1)
        true = torch.empty(1, ours.context, dtype=torch.float64, device="cuda")
        fill(
            true,
            ours.q[one],
            ours.weights[one],
            ours.pool,
            ours.page_table,
            ours.token_row[one],
            ours.limit[one],
            None,
            PAGE,
            torch.float64,
        )
        error = float((ours.out[one] - true).abs().max() / true.abs().max())
        assert error < 1e-3, f"token {token}: relative error {error:.1e}"


def _variants(inputs: Inputs) -> dict[str, Call]:
    which = "one" if inputs.query == 1 else "few" if inputs.query <= 2 else "many"
    which = which if inputs.pool.shape[1] == PAGE * _FP8 else f"{which}, fp4"
    return {json.dumps(config): partial(inputs.ours, config) for config in VARIANTS[which]}


def _build_decode(batch: int, context: int, query: int, key: int) -> Runs:
    copies = max(1, min(8, round(_CACHE_BYTES / (key * batch * context))))
    every = [_inputs(batch, context, query, key) for _ in range(copies)]
    wide = every if key == _FP8 else [_inputs(batch, context, query) for _ in range(copies)]
    peers: dict[str, Call] = {} if key == _FP8 else {"fp8 keys": _InTurn([each.ours for each in wide])}
    others = [peer for peer in map(_paged_peer, wide) if peer is not None]
    return Runs(
        ours=every[0].ours,
        peers=peers | ({"deep_gemm": _InTurn(others)} if others else {}),
        variants=_variants(every[0]),
        check=partial(_check, every[0]),
        rotate=[each.ours for each in every[1:]],
    )


def _build_prefill(tokens: int, context: int, key: int) -> Runs:
    inputs = _inputs(1, context, tokens, key)
    wide = inputs if key == _FP8 else _inputs(1, context, tokens)
    peers: dict[str, Call] = {} if key == _FP8 else {"fp8 keys": wide.ours}
    other = _ragged_peer(wide)
    return Runs(
        ours=inputs.ours,
        peers=peers if other is None else peers | {"deep_gemm": other},
        variants=_variants(inputs),
        check=partial(_check, inputs),
    )


class _InTurn:
    """One call after the other: a peer meets cold inputs as often as we do."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = cycle(calls)

    def __call__(self) -> Any:
        return next(self._calls)()


def _paged_peer(inputs: Inputs) -> Call | None:
    """The same pool and table; the schedule it needs is made outside the timing, to its advantage."""
    try:
        deep_gemm = import_module("deep_gemm")
    except ImportError:
        return None
    lengths = inputs.limit.view(-1, inputs.query)
    q = inputs.q.view(len(lengths), inputs.query, HEADS, WIDTH)
    pool = inputs.pool.view(-1, PAGE, 1, WIDTH + 4)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, torch.cuda.get_device_properties(0).multi_processor_count)
    return partial(deep_gemm.fp8_paged_mqa_logits, q, pool, inputs.weights, lengths, inputs.page_table, schedule, inputs.context)


def _ragged_peer(inputs: Inputs) -> Call | None:
    """Contiguous keys, gathered outside the timing, to its advantage."""
    try:
        deep_gemm = import_module("deep_gemm")
    except ImportError:
        return None
    pages = inputs.pool[inputs.page_table[0].long()]
    keys = pages[:, : PAGE * WIDTH].reshape(-1, WIDTH).view(torch.float8_e4m3fn)
    scales = pages[:, PAGE * WIDTH :].contiguous().view(torch.float32).view(-1)
    first = torch.zeros_like(inputs.limit)
    return partial(deep_gemm.fp8_mqa_logits, inputs.q, (keys, scales), inputs.weights, first, inputs.limit)
