"""Part of ``bench multi-gpu``: one host pool in shared memory, fetched from by one GPU alone and by all at once."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ....attention.kv.host.pool import HostPool
from ....attention.kv.host.shm import SHM, ShmBacking
from ....parallel.backends import kernels_or_twin
from ....parallel.interface import choose_gloo_interface
from ..kv.link_rows import Choice, Choices, MemoryRows
from ..results import Row
from .parts import write_rows

_PAGE, _PITCH, _ROW = 64, 1024, 656
_DEVICE_ROWS = 65536
_LEAST_GIB = 0.5  # of a pool in which fetches miss the caches
_LAUNCHES = 16  # lists of rows that launches take in turn


class Fetcher:
    """Fetches rows of the pool for a while."""

    def __init__(self, memory: torch.Tensor, device: torch.device, choice: Choice) -> None:
        self._rows, self._device = MemoryRows(memory, _ROW), device
        self._pool = torch.empty(_DEVICE_ROWS, _ROW, dtype=torch.uint8, device=device)
        self._choices = Choices(choice, self._rows.n_rows, _ROW, _DEVICE_ROWS, _LAUNCHES, device)
        self._ops = kernels_or_twin("....attention.kernels.fetch_rows", __package__, cuda=device.type == "cuda")
        self._bytes = choice.requests * choice.rows * _ROW

    def gb_per_s(self, seconds: float) -> float:
        """Bandwidth over at least ``seconds``; the device never runs dry."""
        self._round()
        self._wait()
        start, rounds = time.monotonic(), 0
        while time.monotonic() - start < seconds:
            self._round()
            rounds += 1
            if rounds % 4 == 0:
                self._wait()
        self._wait()
        return rounds * _LAUNCHES * self._bytes / (time.monotonic() - start) / 1e9

    def _round(self) -> None:
        found = self._choices
        for source, target, count in zip(found.source, found.target, found.count, strict=True):
            self._ops.fetch_rows(self._rows, self._pool, source, target, count)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def shared_bytes() -> int:
    """Bytes of memory on this host that belong to files in shared memory; of those in the pool's folder where the kernel does not say."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    if "Shmem" in fields:
        return int(fields["Shmem"].split()[0]) << 10
    stat = os.statvfs(SHM)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def fitting_gib(asked: float, free: int) -> float:
    """GiB of the pool: what was asked for, or what the folder takes of it, which in a container may be little.

    Raises:
        ValueError: there is next to nothing.
    """
    fits = 0.9 * free / 2**30
    if fits < min(asked, _LEAST_GIB):
        room = f"{SHM} has {free / 2**20:.0f} MiB free"
        raise ValueError(f"{room}, the pool takes {_LEAST_GIB} GiB at least; mount a larger one (docker: --shm-size)")
    return min(asked, fits)


def main() -> None:
    """Flags, then a pool of all ranks; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-gib", type=float, default=16.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    choose_gloo_interface("127.0.0.1", 0, single_host=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = shared_bytes()
    dist.barrier()
    stat = os.statvfs(SHM)
    gib = torch.tensor([fitting_gib(args.pool_gib, stat.f_bavail * stat.f_frsize)], dtype=torch.float64)
    dist.broadcast(gib, 0)  # all map one file
    pages = int(float(gib) * 2**30) // (_PAGE * _PITCH)
    job = f"multi-gpu-{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ['MASTER_PORT']}"
    backing = ShmBacking(job=job, member=rank, members=world)
    with HostPool(1, pages, _PAGE, _PITCH, backing, device=device) as pool:
        rows = _rows(pool, device, rank, world, args.seconds, before)
        if rank == 0:
            write_rows(args.out, rows)
            for row in rows:
                print(f"{row.name}: {row.value:.2f} {row.unit} {row.params}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def _rows(pool: HostPool, device: torch.device, rank: int, world: int, seconds: float, before: int) -> list[Row]:
    small = device.type == "cpu"
    choice = Choice(requests=2 if small else 16, rows=64 if small else 2048, context=512 if small else 131072)
    fetcher = Fetcher(pool.layer(0).bytes.view(-1), device, choice)
    alone = 0.0
    for turn in range(world):
        dist.barrier()
        if turn == rank:
            alone = fetcher.gb_per_s(seconds)
    dist.barrier()
    both = fetcher.gb_per_s(seconds)
    table = torch.tensor([alone, both], dtype=torch.float64)
    everyone = [torch.zeros_like(table) for _ in range(world)]
    dist.all_gather(everyone, table)
    singles, together = [float(t[0]) for t in everyone], sum(float(t[1]) for t in everyone)
    params = {"ranks": world, "rows": choice.requests * choice.rows, "row_bytes": _ROW, "pool_gib": round(pool.n_bytes / 2**30, 2)}
    grown = max(0, shared_bytes() - before)
    return [
        Row(name="fetch from one pool by all GPUs", params=params, value=together, unit="GB/s", better="higher",
            peers={"one GPU alone": sum(singles) / world}),
        Row(name="fetch by all GPUs over one alone", params=params, value=together / (sum(singles) / world), unit="times", better="higher",
            target=0.9 * world),
        Row(name="shared memory of the host over the pool's bytes", params=params, value=grown / pool.n_bytes, unit="times", better="lower",
            target=1.05),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
