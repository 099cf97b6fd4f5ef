"""Which parts the run has, for a number of GPUs, and what each may take."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .layouts import PP
from .parity import fitting
from .parts import Part
from .shapes import BASE, SMALL, experts_of

_HERE = "rorqual.launch.bench.multi_gpu"
#: parts by the names that ``--only`` takes, those of every run: short ones first, so that a run that is cut off lacks no whole kind
GROUPS = ("parity", "exchange", "pool", "slice")
#: and those that must be asked for: a model of full size needs the memory of eight GPUs, and longer
LARGE = ("full",)
#: those that have a part for one GPU with its share of the experts
SHARED = ("slice", "full")
#: transports that need a package of their own
_OPTIONAL = {"nvshmem": "nvshmem", "deep_ep": "deep_ep"}


def program(ranks: int, *, device: str, only: tuple[str, ...], right: Path) -> list[Part]:
    """The parts in their order.

    Args:
        ranks: GPUs, or CPU ranks in a rehearsal.
        device: cuda; cpu: small, to see that it works.
        only: names of ``GROUPS`` and ``LARGE``.
        right: where the tokens of one rank go.
    """
    made = {
        "parity": _parity(ranks, device, right), "exchange": _exchange(ranks, device), "slice": _slice(ranks, device),
        "pool": _pool(ranks, device), "full": _full(ranks, device),
    }  # fmt: skip
    found = [part for group in (*GROUPS, *LARGE) if group in only for part in made[group]]
    return _unhurried(found, device)


def share(of: int, *, device: str, only: tuple[str, ...]) -> list[Part]:
    """Parts for one GPU with the experts that a rank of ``of`` has: a rank's memory, start and steps, without the exchange.

    Raises:
        ValueError: a share is too small for a token to choose its experts from.
    """
    experts, groups = experts_of(of, small=device == "cpu")
    if experts < 2 * groups * of:
        raise ValueError(
            f"--share-of {of} leaves one GPU {experts // of} of {experts} experts, and {groups} groups of two are the least that routing "
            f"takes; at most --share-of {experts_of(1, small=False)[0] // (2 * groups)}"
        )
    made = {"slice": _slice(of, device)[:1], "full": _full(1, device, share_of=of)}
    return _unhurried([part for group in SHARED if group in only for part in made[group]], device)


def _unhurried(parts: list[Part], device: str) -> list[Part]:
    """Twice the time for a rehearsal, whose ranks share a few cores."""
    return [replace(part, limit_s=2 * part.limit_s) for part in parts] if device == "cpu" else parts


def _parity(ranks: int, device: str, right: Path) -> list[Part]:
    """A part for each number of stages, so that a layout that fails costs few others."""
    module, words = f"{_HERE}.parity", ("--device", device, "--right", str(right))
    found = [Part(name="tokens of one rank", module=module, words=words, ranks=1, limit_s=120.0)]
    stages = sorted({layout[PP] for layout in fitting(ranks)})
    for pp in stages:
        name, more = f"tokens of every layout, pp {pp}", ("--ranks", str(ranks), "--stages", str(pp), "--out", "{out}")
        found.append(Part(name=name, module=module, words=(*words, *more), ranks=ranks, limit_s=90.0))
    if not stages:
        why = f"no product pp x dp x tp of {ranks} ranks fits the embedded model"
        found.append(Part(name="tokens of every layout", module=module, words=words, ranks=ranks, limit_s=0.0, left_out=why))
    return found


def _exchange(ranks: int, device: str) -> list[Part]:
    cpu = device == "cpu"
    usual, alone = (["torch", "shm"], ["torch_static"]) if cpu else (["torch", "symm"], ["torch_static", *_OPTIONAL])
    slots = -(-(16 if cpu else 256) // ranks) * ranks
    size = ("--hidden", "256", "--tokens", "1,32", "--repeat", "3") if cpu else ("--tokens", "1,32,128,512,2048,4096")
    start = ("bench", "comm", "--backend")

    def part(name: str, *words: str, left_out: str = "", limit_s: float) -> Part:
        return Part(name=name, module="rorqual.launch", words=(*start, *words), ranks=ranks, limit_s=limit_s, left_out=left_out)

    missing = {name: f"{name} is not installed" for name, package in _OPTIONAL.items() if find_spec(package) is None}
    checks = [part(f"conformance of {n}", n, "--check", "--brief", limit_s=75.0, left_out=missing.get(n, ""))
              for n in (*usual, *(n for n in alone if n in _OPTIONAL))]  # fmt: skip
    table = ("--slots", str(slots), *size, "--output-json", "{out}")
    tables = [part(f"dispatch and combine of {' and '.join(usual)}", ",".join(usual), "--skip-unusable", *table, limit_s=100.0)]
    # A transport that breaks takes its process along, so those that need not work have their own.
    tables += [part(f"dispatch and combine of {n}", n, *table, limit_s=90.0, left_out=missing.get(n, "")) for n in alone]
    return [*checks, *tables]


def _slice(ranks: int, device: str) -> list[Part]:
    small = device == "cpu"
    experts, groups = experts_of(ranks, small=small)
    size = ("--requests", "4", "--input-len", "24", "--output-len", "8") if small else ()
    common: dict[str, Any] = {"device": device, "kv_cache_dtype": "fp8", "max_total_tokens": 4096 if small else 65536}
    common |= {"dtype": "float32"} if small else {"cuda_graph_bs": [128]}
    balance = {"enable_eplb": True, "num_redundant_experts": ranks * 4, "eplb_step_interval": 40, "eplb_window_size": 40}
    halves = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}

    def part(name: str, n: int, share: int, *words: str, **engine: object) -> Part:
        shape = {**(SMALL if small else {}), "n_group": groups, "n_routed_experts": share}
        given = ("--model", BASE, "--shape", json.dumps(shape), "--name", name, "--ranks", str(n), "--engine",
                 json.dumps({**common, **engine}), "--out", "{out}", *size, *words)  # fmt: skip
        return Part(name=name, module=f"{_HERE}.slice", words=given, ranks=n, limit_s=120.0)

    return [
        part("one GPU with its share of the experts", 1, experts // ranks),
        part("experts over all GPUs", ranks, experts, "--skewed"),
        part("experts over all GPUs, two batches", ranks, experts, **halves),
        part("experts over all GPUs, balanced", ranks, experts, "--skewed", "--settle", "1" if small else "3", **balance),
    ]


def _pool(ranks: int, device: str) -> list[Part]:
    size = ("--pool-gib", "0.05", "--seconds", "0.3") if device == "cpu" else ("--pool-gib", "16", "--seconds", "2")
    words = ("--device", device, *size, "--out", "{out}")
    return [Part(name="one host pool", module=f"{_HERE}.pool", words=words, ranks=ranks, limit_s=75.0)]


def _full(ranks: int, device: str, *, share_of: int = 1) -> list[Part]:
    """An engine without and one with the host pool. On fewer than eight GPUs they have as many layers as fit.

    ``share_of``: one rank has the experts that one of so many has.
    """
    small = device == "cpu"
    experts, groups = experts_of(ranks * share_of, small=small)
    shape = {**(SMALL if small else {}), "n_group": groups, "n_routed_experts": experts // share_of}
    shape["first_k_dense_replace"] = 1 if small else 3
    contexts = [[128, 2], [256, 1]] if small else [[32768, 4], [131072, 1]]
    size = ("--layers", "2", "--output-len", "8") if small else ()
    found = []
    for offload in ("off", "host"):
        engine: dict[str, Any] = {"device": device, "kv_offload": offload, "kv_cache_dtype": "fp8"}
        engine |= {"dtype": "float32", "max_num_batched_tokens": 64} if small else {}
        engine |= {"kv_host_memory": 0.25} if small and offload == "host" else {}
        words = ("--contexts", json.dumps(contexts), "--ranks", str(ranks), "--model", BASE, "--shape", json.dumps(shape), "--engine",
                 json.dumps(engine), "--seconds", "{left}", "--out", "{out}", *size)  # fmt: skip
        whose = f"one rank of {share_of}, " if share_of > 1 else ""
        found.append(Part(name=f"{whose}full size, offload {offload}", module=f"{_HERE}.full", words=words, ranks=ranks, limit_s=270.0))
    return found
