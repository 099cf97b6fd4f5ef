"""Which parts the run has, for a number of GPUs, and what each may take."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from .parts import Part

_HERE = "rorqual.launch.bench.multi_gpu"
#: parts by the names that ``--only`` takes, those of every run
GROUPS = ("parity", "exchange", "slice", "pool")
#: and those that must be asked for: a model of full size needs the memory of eight GPUs, and longer
LARGE = ("full",)


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
    return [part for group in (*GROUPS, *LARGE) if group in only for part in made[group]]


def _parity(ranks: int, device: str, right: Path) -> list[Part]:
    words = ("--device", device, "--right", str(right))
    return [
        Part(name="tokens of one rank", module=f"{_HERE}.parity", words=words, ranks=1, limit_s=60.0),
        Part(name="tokens of every layout", module=f"{_HERE}.parity", words=(*words, "--ranks", str(ranks), "--out", "{out}"), ranks=ranks,
             limit_s=120.0),
    ]  # fmt: skip


def _exchange(ranks: int, device: str) -> list[Part]:
    names = ["torch", "shm"] if device == "cpu" else ["torch", "symm", *_installed()]
    size = (
        ("--hidden", "256", "--tokens", "1,32", "--slots", "16", "--repeat", "3")
        if device == "cpu"
        else ("--tokens", "1,32,128,512,2048,4096")
    )
    checks = [
        Part(name=f"conformance of {name}", module="rorqual.launch", words=("bench", "comm", "--check", "--brief", "--backend", name),
             ranks=ranks, limit_s=60.0)
        for name in names
    ]  # fmt: skip
    words = ("bench", "comm", "--backend", ",".join(names), *size, "--output-json", "{out}")
    return [*checks, Part(name="dispatch and combine", module="rorqual.launch", words=words, ranks=ranks, limit_s=75.0)]


def _installed() -> list[str]:
    return [name for name, package in (("nvshmem", "nvshmem"), ("deep_ep", "deep_ep")) if find_spec(package) is not None]


def _slice(ranks: int, device: str) -> list[Part]:
    small = device == "cpu"
    model, experts = ("tiny", 16) if small else ("v3.2-slice", 256)
    size = ("--requests", "4", "--input-len", "24", "--output-len", "8") if small else ()
    common = {
        "device": device,
        "max_total_tokens": 4096 if small else 65536,
        **({"dtype": "float32"} if small else {"kv_cache_dtype": "fp8"}),
    }
    graphs = {} if small else {"cuda_graph_bs": [128]}
    balance = {"enable_eplb": True, "num_redundant_experts": ranks * 4, "eplb_step_interval": 40, "eplb_window_size": 40}
    halves = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}

    def part(name: str, n: int, *words: str, **engine: object) -> Part:
        settings = json.dumps({**common, **graphs, **engine})
        given = ("--model", model, "--name", name, "--ranks", str(n), "--engine", settings, "--out", "{out}", *size, *words)
        return Part(name=name, module=f"{_HERE}.slice", words=given, ranks=n, limit_s=100.0)

    return [
        part("one GPU with its share of the experts", 1, "--experts", str(experts // ranks)),
        part("experts over all GPUs", ranks, "--skewed"),
        part("experts over all GPUs, two batches", ranks, **halves),
        part("experts over all GPUs, balanced", ranks, "--skewed", "--settle", "3", **balance),
    ]


def _pool(ranks: int, device: str) -> list[Part]:
    size = ("--pool-gib", "0.05", "--seconds", "0.3") if device == "cpu" else ("--pool-gib", "16", "--seconds", "2")
    words = ("--device", device, *size, "--out", "{out}")
    return [Part(name="one host pool", module=f"{_HERE}.pool", words=words, ranks=ranks, limit_s=60.0)]


def _full(ranks: int, device: str) -> list[Part]:
    small = device == "cpu"
    size = ("--model", "tiny", "--layers", "3", "--dense", "1") if small else ()
    found = []
    for context, requests in ((48, 2), (96, 1)) if small else ((32768, 8), (131072, 2)):
        for offload in ("off", "host"):
            engine: dict[str, object] = {"device": device, "kv_offload": offload, "max_total_tokens": requests * (context + 256)}
            engine |= {"dtype": "float32", "kv_host_memory": 0.25} if small else {"kv_cache_dtype": "fp8", "cuda_graph_bs": [requests]}
            words = (
                "--context",
                str(context),
                "--requests",
                str(requests),
                "--ranks",
                str(ranks),
                "--engine",
                json.dumps(engine),
                "--out",
                "{out}",
            )
            name = f"full size, contexts of {context}, offload {offload}"
            found.append(Part(name=name, module=f"{_HERE}.full", words=(*words, *size), ranks=ranks, limit_s=600.0))
    return found
