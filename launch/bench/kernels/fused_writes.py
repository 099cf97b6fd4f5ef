"""Cases of the fused elementwise kernels: cache writes, index queries, RoPE of the queries, norms. Their floor is bytes moved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ....attention.hadamard import hadamard
from .case import Call, Case, Runs, Target

_TOKENS = (1, 64, 4096)
_L2 = 192 << 20  # bytes of inputs that the 60 MB L2 cannot hold


def cases() -> list[Case]:
    """Every kernel at DeepSeek-V3.2's widths, for one token, a decode batch and a prefill chunk."""
    out: list[Case] = []
    for tokens in _TOKENS:
        out += [_latent(tokens), _index_key(tokens, 132), _index_key(tokens, 68), _index_query(tokens, 64), _query_rope(tokens, 128)]
        out += [_norm(tokens, 7168, add=True, quantise=False), _norm(tokens, 1536, add=False, quantise=False)]
        out += [_norm(tokens, 7168, add=True, quantise=True), _norm(tokens, 1536, add=False, quantise=True)]
    return out


def _target(op: str, tokens: int) -> Target:
    """A launch where there is little to do; the writes of a prefill chunk are little too."""
    if tokens < 1024 or op.startswith("write"):
        return Target(us=8.0 if tokens >= 1024 else 5.0)
    return Target(roof=0.5 if op in ("index_query", "rms_norm_quantise") else 0.7)


def _variants(run: Callable[[dict[str, Any]], Any], configs: Iterable[dict[str, Any]]) -> dict[str, Call]:
    """JSON of a config -> a call with it."""
    return {json.dumps(config): partial(run, config) for config in configs}


def _copies(n_bytes: int) -> int:
    """Input sets to rotate through, so that a large one is not found in the L2."""
    return 1 if n_bytes < 1 << 20 else max(1, min(8, -(-_L2 // n_bytes)))


def _turn(tokens: int) -> torch.Tensor:
    angle = torch.rand(tokens, 32, device="cuda") * 6.28
    return torch.stack((angle.cos(), angle.sin()), -1).contiguous()


def _latent(tokens: int) -> Case:
    moved = tokens * (576 * 2 + 656 + 256)

    def build() -> Runs:
        from ....attention.kernels import latent_write

        sets = [torch.randn(tokens, 576, device="cuda", dtype=torch.bfloat16) for _ in range(_copies(moved))]
        weight, turn = torch.ones(512, device="cuda", dtype=torch.bfloat16), _turn(tokens)
        rows = torch.randperm(4 * tokens + 64, device="cuda")[:tokens]
        pool = torch.zeros(4 * tokens + 64, 656, device="cuda", dtype=torch.uint8)

        def call(kv: torch.Tensor) -> Call:
            return lambda: latent_write.write_latent(kv, weight, 1e-6, turn, rows, pool, interleaved=True)

        configs = [{"TOKENS": n, "num_warps": w} for n, w in ((1, 1), (1, 4), (1, 8), (2, 2), (2, 4), (4, 4), (8, 4), (8, 8))]
        variants = _variants(lambda c: latent_write.launch(sets[0], weight, 1e-6, turn, rows, pool, True, c), configs)
        return Runs(ours=call(sets[0]), rotate=[call(kv) for kv in sets[1:]], variants=variants)

    return _case("write_latent", tokens, {"C": 512, "R": 64}, moved, build, {"tokens": tokens})


def _index_key(tokens: int, key: int) -> Case:
    """``key``: bytes of one, 132 in FP8 and 68 in FP4."""
    moved = tokens * (128 * 2 + key + 256)

    def build() -> Runs:
        from ....attention.kernels import index_write

        k = torch.randn(tokens, 128, device="cuda", dtype=torch.bfloat16)
        weight, turn = torch.ones(128, device="cuda"), _turn(tokens)
        pages = tokens // 16 + 1
        rows = torch.randperm(64 * pages, device="cuda")[:tokens]
        pool = torch.zeros(pages, 64 * key, device="cuda", dtype=torch.uint8)

        def ours() -> None:
            index_write.write_index(k, weight, weight, 1e-6, turn, rows, pool, page_size=64, interleaved=False, rotate=True)

        shapes = (
            ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (8, 1), (8, 2), (16, 2)) if key == 132 else ((1, 1), (1, 2), (2, 2), (4, 2), (4, 4))
        )
        configs = [{"TOKENS": n, "num_warps": w} for n, w in shapes]
        variants = _variants(lambda c: index_write.launch(k, weight, weight, 1e-6, turn, rows, pool, 64, False, True, c), configs)
        return Runs(ours=ours, variants=variants)

    return _case("write_index" if key == 132 else "write_index_fp4", tokens, {"D": 128}, moved, build, {"tokens": tokens})


def _index_query(tokens: int, heads: int) -> Case:
    moved = tokens * (heads * (128 * 3 + 8) + 256)

    def build() -> Runs:
        from ....attention.kernels import index_query

        sets = [torch.randn(tokens, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(_copies(moved))]
        weights, turn = torch.randn(tokens, heads, device="cuda"), _turn(tokens)

        def call(q: torch.Tensor) -> Call:
            return lambda: index_query.index_query(q, weights, turn, interleaved=False, rotate=True, fp8=True, scale=0.01)

        def check() -> None:
            codes, w = index_query.index_query(sets[0], weights, turn, interleaved=False, rotate=False, fp8=True, scale=1.0)
            turned, w2 = call(sets[0])()
            plain = hadamard(codes.float() * (w / weights)[..., None])
            other = turned.float() * (w2 / weights / 0.01)[..., None]
            assert float((plain - other).norm() / other.norm()) < 0.06, "the transform is not the same with FP8 before and after it"

        out, out_w = call(sets[0])()
        configs = [{"HEADS": n, "num_warps": w} for n, w in ((8, 1), (8, 2), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8))]
        variants = _variants(lambda c: index_query.launch(sets[0], weights, turn, out, out_w, False, True, 0.01, c), configs)
        return Runs(ours=call(sets[0]), rotate=[call(q) for q in sets[1:]], variants=variants, check=check, written=(out, out_w))

    return _case("index_query", tokens, {"H": heads, "D": 128}, moved, build, {"tokens": tokens, "heads": heads})


def _query_rope(tokens: int, heads: int) -> Case:
    moved = tokens * (heads * 256 + 256)

    def build() -> Runs:
        from ....attention.kernels import query_rope

        sets = [torch.randn(tokens, heads, 192, device="cuda", dtype=torch.bfloat16) for _ in range(_copies(moved))]
        turn, out = _turn(tokens), torch.empty(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)

        def call(q: torch.Tensor) -> Call:
            return lambda: query_rope.query_rope(q, turn, interleaved=True, dtype=torch.bfloat16)

        configs = [{"HEADS": n, "num_warps": w} for n, w in ((8, 1), (16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))]
        variants = _variants(lambda c: query_rope.launch(sets[0], turn, out, True, c), configs)
        return Runs(ours=call(sets[0]), rotate=[call(q) for q in sets[1:]], variants=variants, written=(out,))

    return _case("query_rope", tokens, {"H": heads, "R": 64}, moved, build, {"tokens": tokens, "heads": heads})


def _norm(tokens: int, width: int, *, add: bool, quantise: bool) -> Case:
    moved = tokens * width * 2 * ((4 if add else 2) if not quantise else (3 if add else 1)) + (tokens * width * 33 // 32 if quantise else 0)

    def build() -> Runs:
        from ....attention.kernels import norm

        def matrix() -> torch.Tensor:
            return torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

        weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        sets = [(matrix(), matrix() if add else None) for _ in range(_copies(moved))]

        def call(x: torch.Tensor, residual: torch.Tensor | None) -> Call:
            if quantise:
                return lambda: norm.rms_norm_quantise(x, weight, 1e-6, residual)
            return lambda: norm.rms_norm(x, weight, 1e-6) if residual is None else norm.rms_norm(x, weight, 1e-6, residual)

        x, residual = sets[0]
        codes, scales, _, _ = norm.rms_norm_quantise(x, weight, 1e-6)
        y, total = None if quantise else matrix(), matrix() if add else None
        narrow = (codes, scales) if quantise else (None, None)
        variants = _variants(
            lambda c: norm.launch(x, weight, 1e-6, residual, y, total, narrow[0], narrow[1], c),
            [{"num_warps": w} for w in (1, 2, 4, 8, 16)],
        )
        peers: dict[str, Call] = {}
        if not add and not quantise:
            peers["torch"] = lambda: torch.nn.functional.rms_norm(x, (width,), weight, 1e-6)
        written = tuple(part for part in (*narrow, y, total) if part is not None)
        return Runs(ours=call(*sets[0]), rotate=[call(*each) for each in sets[1:]], variants=variants, peers=peers, written=written)

    op = "rms_norm_quantise" if quantise else "rms_norm"
    shape = {"W": width, "residual": add}
    return _case(op, tokens, shape, moved, build, {"tokens": tokens, "width": width, "quantise": quantise}, stored="rms_norm")


def _case(
    op: str, tokens: int, shape: dict[str, Any], moved: int, build: Callable[[], Runs], tune: dict[str, Any], stored: str | None = None
) -> Case:
    """A row of the table; ``stored`` is the operation whose launch settings it looks up, if another name."""
    sizes = " ".join(f"{name}{value}" for name, value in shape.items() if value is not False)
    return Case(
        op=stored or op,
        name=f"{op} T{tokens} {sizes}",
        params={"tokens": tokens, **shape},
        build=build,
        n_bytes=float(moved),
        target=_target(op, tokens),
        tune_shape=tune,
    )
