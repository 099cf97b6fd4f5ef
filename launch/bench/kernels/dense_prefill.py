"""Expanded attention of prefill chunks, and the gather of FP8 rows before it; torch's attention is the peer."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from itertools import product

import torch

from .case import Call, Case, Runs, Target

_NOPE, _ROPE, _VALUE, _LATENT, _SCALE = 128, 64, 128, 512, 0.1352


def cases() -> list[Case]:
    """A prompt alone, a batch of chunks with earlier keys, and the gather of one long context."""
    return [
        _attention([8192], [8192], 16, Target(peer="torch", ratio=0.8)),
        _attention([2048] * 4, [2048] * 4, 16, None),
        _attention([1024] * 4, [5120] * 4, 16, None),
        _gather(131_072),
    ]


def _attention(queries: list[int], keys: list[int], heads: int, target: Target | None) -> Case:
    pairs = sum(m * (n - m) + m * (m + 1) / 2 for m, n in zip(queries, keys, strict=True))
    width = _NOPE + _ROPE + _VALUE
    return Case(
        op="dense_prefill",
        name=f"expanded {len(queries)} x {queries[0]} of {keys[0]}, {heads} heads",
        params={"requests": len(queries), "queries": queries[0], "keys": keys[0], "heads": heads},
        build=partial(_build, queries, keys, heads),
        n_bytes=2.0 * heads * (sum(queries) + sum(keys)) * width,
        flops=2.0 * heads * pairs * width,
        unit="bf16",
        target=target,
        tune_shape={"width": width},
    )


def _build(queries: list[int], keys: list[int], heads: int) -> Runs:
    from ....attention.kernels.dense_prefill import VarlenLaunch, varlen_attention
    from ....attention.kernels.dense_prefill_torch import evaluate_varlen

    q = torch.randn(sum(queries), heads, _NOPE + _ROPE, device="cuda", dtype=torch.bfloat16)
    both = torch.randn(sum(keys), heads, _NOPE + _VALUE, device="cuda", dtype=torch.bfloat16)
    rope = torch.randn(sum(keys), _LATENT + _ROPE, device="cuda", dtype=torch.bfloat16)[:, _LATENT:]
    starts = [torch.tensor([0, *lengths], device="cuda").cumsum(0).int() for lengths in (queries, keys)]
    operands = (q, both[..., :_NOPE], rope, both[..., _NOPE:], starts[0], starts[1])

    def call(launch: VarlenLaunch | None = None) -> Call:
        return lambda: varlen_attention(*operands, scale=_SCALE, causal=True, max_query=max(queries), max_key=max(keys), launch=launch)

    def check() -> None:
        one = slice(0, 1)
        some = (q[:, one], both[:, one, :_NOPE], rope, both[:, one, _NOPE:], starts[0], starts[1])
        wanted, _ = evaluate_varlen(*some, scale=_SCALE, causal=True, compute=torch.float32)
        found = call()()[0][:, one]
        error = (found - wanted).norm() / wanted.norm()
        assert error < 1e-2, f"relative error {error:.1e}"

    launches = [
        VarlenLaunch(queries=m, keys=n, warps=m // 16, stages=s) for (m, n), s in product([(64, 64), (128, 64), (128, 128)], (2, 3))
    ]
    return Runs(
        ours=call(),
        peers={"torch": _torch_call(q, both, rope)} if len(queries) == 1 and queries == keys else {},
        variants={json.dumps(asdict(launch)): call(launch) for launch in launches if launch.keys * launch.stages <= 256},
        check=check,
    )


def _torch_call(q: torch.Tensor, both: torch.Tensor, rope: torch.Tensor) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shared = rope[:, None].expand(-1, both.shape[1], -1)
    query, value = q.transpose(0, 1)[None], both[..., _NOPE:].transpose(0, 1)[None]
    key = torch.cat((both[..., :_NOPE], shared), -1).transpose(0, 1)[None]

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=_SCALE)

    return call


def _gather(rows: int) -> Case:
    return Case(
        op="gather_latent",
        name=f"gather {rows} FP8 rows to bf16",
        params={"rows": rows},
        build=partial(_build_gather, rows),
        n_bytes=float(rows * (656 + 2 * (_LATENT + _ROPE))),
        target=Target(roof=0.6),
    )


def _build_gather(rows: int) -> Runs:
    from ....attention.kernels import dense_prefill_torch
    from ....attention.kernels.dense_prefill import gather_latent
    from ....attention.kv.layout import encode_latent

    pool = encode_latent(torch.randn(2 * rows, _LATENT + _ROPE, device="cuda"), _LATENT)
    chosen = torch.randperm(2 * rows, device="cuda")[:rows].int()
    arguments = (pool, chosen, _LATENT, _ROPE, torch.bfloat16)

    def check() -> None:
        assert torch.equal(gather_latent(*arguments), dense_prefill_torch.gather_latent(*arguments)), "differs from the plain version"

    return Runs(ours=lambda: gather_latent(*arguments), peers={"torch": lambda: dense_prefill_torch.gather_latent(*arguments)}, check=check)
