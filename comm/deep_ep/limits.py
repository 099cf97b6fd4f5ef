"""What deep_ep's kernels can do, as refusals with numbers before anything is allocated."""

from __future__ import annotations

import math
import os

from ..dispatcher import EPSpec
from ..fp8 import BLOCK

LL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # the kernels of the low-latency mode are compiled for these
LL_TOP_K = 11
LL_BYTES = 32 << 30  # most that its buffer may have
LL_DEPTH = 2  # results of it that may be held at a time
LL_ROWS = 4  # rows of a slot are a multiple of them, because of how scales are laid out
ELASTIC_TOP_K = 32
ELASTIC_WIDTH = 256  # values that a warp adds at a time in combine: hidden is a multiple of them
ELASTIC_SLOTS = 2048
ELASTIC_SLOTS_PER_RANK = 256
ELASTIC_RANKS = 1024


def _common(spec: EPSpec, backend: str) -> None:
    if spec.dtype != "bfloat16":
        raise ValueError(f"all-to-all backend {backend!r} carries and adds bfloat16, found EPSpec.dtype {spec.dtype!r}; use torch or symm")
    if spec.payload == "bytes":
        raise ValueError(f"all-to-all backend {backend!r} has no payload of plain bytes; use torch or symm")


def check_elastic(spec: EPSpec) -> None:
    """Raise ValueError for a spec that V2 buffers cannot serve."""
    _common(spec, "deep_ep")
    if spec.hidden % ELASTIC_WIDTH:
        raise ValueError(f"deep_ep's kernels take a hidden of a multiple of {ELASTIC_WIDTH}, found {spec.hidden}; pad it, or use symm")
    for what, found, most in (
        ("slots", spec.n_slots, ELASTIC_SLOTS),
        ("slots of a rank", spec.slots_per_rank, ELASTIC_SLOTS_PER_RANK),
    ):
        if found > most:
            raise ValueError(f"deep_ep takes at most {most} {what}, found {found}; use symm or torch")


def low_latency_tokens(spec: EPSpec, tokens: int | None = None, *, down: bool = False) -> int:
    """``tokens`` a rank (None: ``max_tokens``) up, or ``down``, to a number that the rows of a slot can be laid out for."""
    step = LL_ROWS // math.gcd(LL_ROWS, spec.n_ranks)
    asked = spec.max_tokens if tokens is None else tokens
    return (asked if down else asked + step - 1) // step * step


def low_latency_bytes(hidden: int, max_tokens: int, n_slots: int) -> int:
    """Bytes of a low-latency buffer without its few signals: two of (outgoing rows and incoming rows by slot), messages with a header."""
    out = 16 + max(2 * hidden, hidden + 4 * (hidden // BLOCK))  # of a dispatched token
    back = 2 * hidden + 4 * (hidden // BLOCK)  # of a result
    return 2 * max(max_tokens * out, n_slots * max_tokens * back) + 2 * n_slots * max_tokens * max(out, back)


def check_low_latency(spec: EPSpec) -> None:
    """Raise ValueError for a spec that the low-latency mode of V1 buffers cannot serve."""
    _common(spec, "deep_ep_ll")
    if spec.hidden not in LL_HIDDEN:
        raise ValueError(f"deep_ep's low-latency kernels exist for hidden {', '.join(map(str, LL_HIDDEN))}, found {spec.hidden}; use symm")
    if spec.depth > LL_DEPTH:
        raise ValueError(f"deep_ep's low-latency mode has {LL_DEPTH} result buffers, found EPSpec.depth {spec.depth}")
    tokens = low_latency_tokens(spec)
    depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
    if 2 * (tokens + 1) > depth:
        most = low_latency_tokens(spec, depth // 2 - 1, down=True)
        raise ValueError(
            f"deep_ep's low-latency mode takes at most {most} tokens a rank with queues of {depth} (NVSHMEM_QP_DEPTH), found max_tokens "
            f"{spec.max_tokens}; set NVSHMEM_QP_DEPTH={1 << (2 * tokens + 1).bit_length()} on all ranks, or lower max_tokens"
        )
    need = low_latency_bytes(spec.hidden, tokens, spec.n_slots)
    if need > LL_BYTES:
        most = low_latency_tokens(spec, LL_BYTES * tokens // need, down=True)
        raise ValueError(
            f"deep_ep's low-latency buffer would have {need / 2**30:.2f} GiB for {tokens} tokens x {spec.n_slots} slots x "
            f"{spec.hidden}, and 32 are the most; with these slots max_tokens may be {most}"
        )
