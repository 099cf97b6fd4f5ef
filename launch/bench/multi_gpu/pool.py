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
from ....attention.kv.host.shm import ShmBacking
from ....parallel.backends import kernels_or_twin
from ..kv.link_rows import Choice, Choices, MemoryRows
from ..results import Row
from .parts import write_rows

_PAGE, _PITCH, _ROW = 64, 1024, 656
_DEVICE_ROWS = 65536
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
    """Bytes of memory on this host that belong to files in shared memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) << 10


def main() -> None:
    """Flags, then a pool of all ranks; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-gib", type=float, default=16.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = shared_bytes()
    dist.barrier()
    pages = int(args.pool_gib * 2**30) // (_PAGE * _PITCH)
    backing = ShmBacking(job=f"multi-gpu-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}", member=rank, members=world)
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
