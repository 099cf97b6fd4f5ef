"""A registered host pool: kernels read and write it at its own address, also past 4 GiB and across registrations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from rorqual.attention.kv.host import register as registers
from rorqual.attention.kv.host.pinned import PinnedBacking
from rorqual.attention.kv.host.pool import HostPool
from rorqual.attention.kv.host.shm import SHM, ShmBacking

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MEMORY = 1 << 40  # stated, since some virtual machines show less than they have


@triton.jit
def copy_rows(source, target, rows, pitch, target_pitch, n_bytes, to_host: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    here, there = row * pitch + at, tl.program_id(0).to(tl.int64) * target_pitch + at
    mask = at < n_bytes
    if to_host:
        tl.store(target + here, tl.load(source + there, mask), mask)
    else:
        tl.store(target + there, tl.load(source + here, mask), mask)


def fetch(layer, rows):
    out = torch.zeros(len(rows), layer.row_bytes, dtype=torch.uint8, device="cuda")
    copy_rows[(len(rows),)](layer, out, rows, layer.pitch, layer.row_bytes, layer.row_bytes, False, 1024)
    return out


@pytest.mark.parametrize("kind", ["pinned", "shm"])
def test_rows_go_both_ways(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(registers, "_LARGEST", 4 << 20)
    made = {"pinned": PinnedBacking(host_memory=MEMORY), "shm": ShmBacking(job=str(tmp_path), host_memory=MEMORY)}[kind]
    with HostPool(3, 60, 64, 656, made, device="cuda:0") as pool:
        assert not any(path.name == ShmBacking(job=str(tmp_path)).path.name for path in SHM.iterdir())
        pool.poison()
        rows = torch.randperm(pool.layer(0).n_rows, device="cuda")[:500].to(torch.int32)
        for index in range(3):
            layer = pool.layer(index)
            layer.bytes.copy_(torch.randint(0, 256, layer.bytes.shape, dtype=torch.uint8))
            assert torch.equal(fetch(layer, rows).cpu(), layer.bytes[rows.cpu().long(), :656])
            new = torch.randint(0, 256, (500, 656), dtype=torch.uint8, device="cuda")
            copy_rows[(500,)](new, layer, rows, layer.pitch, 656, 656, True, 1024)
            torch.cuda.synchronize()
            assert torch.equal(layer.bytes[rows.cpu().long()], new.cpu())
            assert torch.equal(torch.empty_like(layer.bytes, device="cuda").copy_(layer.bytes, non_blocking=True).cpu(), layer.bytes)


def test_a_closed_pool_can_be_made_again_and_again():
    for _ in range(5):
        with HostPool(4, 200, 64, 656, PinnedBacking(host_memory=MEMORY), device="cuda") as pool:
            rows = torch.tensor([0, pool.layer(3).n_rows - 1], dtype=torch.int32, device="cuda")
            pool.layer(3).bytes[-1].fill_(9)
            assert fetch(pool.layer(3), rows)[1].eq(9).all() and not fetch(pool.layer(3), rows)[0].any()
            torch.cuda.synchronize()
        assert pool.closed


def test_rows_past_4_gib():
    with HostPool(3, 40_000, 64, 656, PinnedBacking(host_memory=MEMORY), device="cuda") as pool:
        last = pool.layer(2)
        assert pool.n_bytes > 4 << 30 and last.n_rows * last.pitch > 1 << 30
        rows = torch.tensor([last.n_rows - 1, 0, 5], dtype=torch.int32, device="cuda")
        last.bytes[-1] = torch.arange(656).to(torch.uint8)
        assert torch.equal(fetch(last, rows)[0].cpu(), torch.arange(656).to(torch.uint8))


def test_a_refused_registration_is_a_users_error_and_leaves_the_device_usable(monkeypatch):
    pool = HostPool(1, 60, 64, 656, PinnedBacking(host_memory=MEMORY), device="cuda")
    edges = [0, pool.n_bytes]
    with pytest.raises(ValueError, match="CUDA could not register"):
        registers.register(pool.layer(0).data_ptr(), edges, torch.device("cuda:0"))  # it is registered already
    torch.cuda.synchronize()
    assert torch.ones(4, device="cuda").sum().item() == 4
    pool.close()
