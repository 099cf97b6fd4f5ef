"""``doctor``: what is installed, what hardware there is, and which backends can be used, or exactly why not."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from .. import __version__
from .console import table
from .doctor_balance import balance_rows
from .doctor_experts import expert_backends
from .doctor_memory import host_memory
from .doctor_transports import transports
from .flags import Parser, add_options
from .nodes.settings import NodeSettings

#: distributions whose versions matter, and what they are for
DISTRIBUTIONS = {
    "torch": "required",
    "numpy": "required",
    "safetensors": "required",
    "tokenizers": "required",
    "jinja2": "required",
    "tqdm": "required",
    "huggingface_hub": "required",
    "triton": "optional",
    "nvshmem4py-cu13": "optional",
    "nvidia-nvshmem-cu13": "optional",
    "sgl-deep-ep": "optional",
    "deep_ep": "optional",
    "flash_mla": "optional",
    "deep_gemm": "optional",
    "sgl-flash-mla": "optional",
    "sgl-deep-gemm": "optional",
    "transformers": "tests and --compare hf",
}

Backend = tuple[str, str, bool, str]  # kind, name, usable, reason


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument(
        "--dist", action="store_true", help="Over several ranks: who is there, can the hosts reach one another, how long messages take."
    )
    parser.add_argument("--dist-timeout", type=float, default=30.0, metavar="X", help="Seconds that --dist waits for anything.")
    parser.add_argument("--max-clock-skew", type=float, default=10.0, metavar="X", help="Seconds that clocks of hosts may be apart.")
    add_options(parser, NodeSettings)


def versions() -> dict[str, str | None]:
    """Version of every distribution of ``DISTRIBUTIONS``, None where it is not installed; rorqual, python and NCCL too."""
    found: dict[str, str | None] = {"rorqual": __version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__
    found["cuda (torch)"] = torch.version.cuda
    found["nccl"] = _nccl_version()
    return found


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def devices() -> list[dict[str, Any]]:
    """The host, then every GPU; memory in bytes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    host = {"device": "cpu", "name": platform.machine(), "cores": cores, "threads": torch.get_num_threads(), "memory": memory}
    rows = [host]
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        capability = f"{props.major}.{props.minor}"
        rows.append(
            {
                "device": f"cuda:{index}",
                "name": props.name,
                "cores": props.multi_processor_count,
                "capability": capability,
                "memory": props.total_memory,
            }
        )
    return rows


def no_gpu_reason() -> str | None:
    """Why CUDA cannot be used, None when it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "no GPU: this torch is built without CUDA"
    return "no GPU: torch has CUDA, but " + ("no driver (libcuda.so.1) was found" if not _has_driver() else "the driver shows no device")


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _kernels(kind: str, name: str, module: str, use: str) -> Backend:
    """A backend that needs a package and a GPU."""
    how = {"flash_mla": "pip install --no-deps sgl-flash-mla", "deep_gemm": "pip install --no-deps sgl-deep-gemm"}
    missing = f"{module} is not installed" + (f" ({how[module]})" if module in how else "")
    reasons = [] if find_spec(module) is not None else [missing]
    gpu = no_gpu_reason()
    if gpu is not None:
        reasons.append(gpu)
    return kind, name, not reasons, "; ".join(reasons) or use


def measured() -> str:
    """Whether launch settings for this GPU were measured."""
    from ..parallel.kernels.tuned import table as settings
    from ..parallel.kernels.tuned import this_device

    rows = sum(len(entries) for entries in settings(this_device()).values())
    return f"{rows} launch settings measured on this GPU" if rows else "no launch settings for this GPU; `rorqual bench tune` measures them"


def backends() -> list[Backend]:
    """Every backend of every kind."""
    gpu = no_gpu_reason()
    rows: list[Backend] = [
        ("device", "cpu", True, f"{torch.get_num_threads()} threads"),
        ("device", "cuda", gpu is None, gpu or "torch sees it"),
    ]
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available()
    rows.append(("collectives", "gloo", gloo, "CPU tensors and control messages" if gloo else "this torch is built without gloo"))
    why = "this torch is built without NCCL" if not nccl else gpu
    rows.append(("collectives", "nccl", why is None, why or "CUDA tensors"))
    rows += expert_backends()
    rows += balance_rows()
    rows.append(("attention", "torch", True, "plain PyTorch, CPU and CUDA; auto takes it on the CPU"))
    rows.append(_kernels("attention", "triton", "triton", f"auto takes it on CUDA; {measured()}"))
    rows.append(
        _kernels("attention", "flash_mla", "flash_mla", "auto takes its sparse attention at shapes where it was measured to be faster")
    )
    rows.append(("moe", "torch", True, "plain PyTorch, CPU and CUDA; auto takes it on the CPU"))
    rows.append(_kernels("moe", "triton", "triton", f"auto takes it on CUDA; {measured()}"))
    rows.append(("fp8 gemm", "dequantise", True, "weights become the compute dtype at load; auto takes it on the CPU"))
    rows.append(("fp8 gemm", "torch", True, "plain PyTorch, CPU and CUDA: a reference"))
    rows.append(_kernels("fp8 gemm", "triton", "triton", f"auto takes it on CUDA; {measured()}"))
    rows.append(_kernels("fp8 gemm", "deep_gemm", "deep_gemm", "only when named; its JIT needs nvcc"))
    return rows


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code."""
    if args.dist:
        from .preflight.command import run_dist

        return run_dist(args)
    found, hardware, usable, memory, ways = versions(), devices(), backends(), host_memory(), transports()
    if args.json:
        rows = [dict(zip(("kind", "name", "usable", "reason"), row, strict=True)) for row in usable]
        print(json.dumps({"versions": found, "devices": hardware, "backends": rows, "host_memory": memory, "transports": ways}, indent=2))
        return 0
    print(
        table(
            ["package", "version", ""],
            [[k, v or ("not installed" if k in DISTRIBUTIONS else "none"), DISTRIBUTIONS.get(k, "")] for k, v in found.items()],
        )
    )
    print()
    lines = [[d["device"], d["name"], d["cores"], f"{d['memory'] / 2**30:.1f} GiB"] for d in hardware]
    print(table(["device", "name", "cores", "memory"], lines))
    print()
    print(table(["host memory", "free or set to", ""], [[row["item"], row["value"], row["note"]] for row in memory]))
    print()
    print(table(["between ranks", "there or set to", ""], [[row["item"], row["value"], row["note"]] for row in ways]))
    print()
    print(table(["kind", "backend", "usable", "why"], [[k, n, "yes" if ok else "no", why] for k, n, ok, why in usable]))
    return 0
