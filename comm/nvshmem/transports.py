"""What NVSHMEM would find on this host to reach other ranks by, and what keeps it from it. Starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .library import Library, find

_PROBE = "import ctypes, sys\ntry:\n    ctypes.CDLL(sys.argv[1])\nexcept OSError as error:\n    print(error)"
_LIMIT_S = 20.0
_USE = {
    "ibrc": "InfiniBand and RoCE, sent by a host thread",
    "ibdevx": "InfiniBand and RoCE over DevX, sent by a host thread",
    "ibgda": "InfiniBand and RoCE, sent by the GPU itself",
    "ucx": "UCX",
    "libfabric": "libfabric: EFA, Slingshot",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of a report."""

    item: str
    good: bool
    note: str


def transports(library: Library) -> list[Fact]:
    """Every transport of the installation: whether its library loads (tried in a process of its own), and why not."""
    facts = []
    for path in sorted(library.host.parent.glob("nvshmem_transport_*.so*")):
        name = path.name.removeprefix("nvshmem_transport_").split(".")[0]
        trouble = _why_not(path)
        facts.append(Fact(item=f"transport {name}", good=not trouble, note=trouble or _USE.get(name, "loads")))
    return facts


def _why_not(path: Path) -> str:
    """What the loader says against ``path``; empty if nothing."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE, str(path)], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not be tried ({type(error).__name__})"
    said = (done.stdout or done.stderr).strip()
    return said.splitlines()[-1] if said else ("" if done.returncode == 0 else f"the loader ended with code {done.returncode}")


def network(root: Path = Path("/")) -> list[Fact]:
    """RDMA devices, whether this user may use them, and whether the GPU's memory can be given to them."""
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if not devices:
        return [Fact(item="RDMA devices", good=False, note="none: ranks of other hosts cannot be reached; one host needs none")]
    facts = [Fact(item="RDMA devices", good=True, note=", ".join(devices))]
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    shut = [path.name for path in verbs if not os.access(path, os.R_OK | os.W_OK)]
    if not verbs:
        facts.append(Fact(item="RDMA access", good=False, note="/dev/infiniband/uverbs* are not in this container: pass the devices in"))
    else:
        note = f"no permission for {', '.join(shut)}: read and write are needed" if shut else "/dev/infiniband may be used"
        facts.append(Fact(item="RDMA access", good=not shut, note=note))
    modules = (root / "proc/modules").read_text(encoding="ascii", errors="replace") if (root / "proc/modules").is_file() else ""
    loaded = [
        name for name in ("nvidia_peermem", "nv_peer_mem", "gdrdrv") if any(line.startswith(f"{name} ") for line in modules.splitlines())
    ]
    note = f"{', '.join(loaded)} loaded" if loaded else "no nvidia_peermem: the GPU's memory is only registered where dma-buf works"
    facts.append(Fact(item="GPU memory for RDMA", good=bool(loaded), note=note))
    return facts


def mps(root: Path = Path("/")) -> Fact:
    """Whether this process would be a client of MPS, which several PEs on one GPU need to run at the same time."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    place = root / folder.relative_to("/") if root != Path("/") and folder.is_absolute() else folder
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if not (place / "control").exists():
        return Fact(item="MPS", good=False, note=f"no server at {folder}: several PEs on one GPU take turns; one PE a GPU needs none")
    portion = (
        f"{share}% of the GPU's threads a process" if share else "no share set: with more than 100% in all, PEs still count as taking turns"
    )
    return Fact(item="MPS", good=True, note=f"server at {folder}; {portion}")


def report(cuda: str | None = None) -> list[Fact]:
    """Everything above; one line with the reason if NVSHMEM is not installed."""
    try:
        library = find(cuda=cuda)
    except ValueError as error:
        return [Fact(item="NVSHMEM", good=False, note=str(error))]
    return [*transports(library), *network(), mps()]
