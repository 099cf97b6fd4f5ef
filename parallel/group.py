"""A set of ranks that talk to each other: tensor collectives, small CPU messages, deadlines with names."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from .failure import CollectiveError, collective_error
from .progress import Progress
from .wire import INLINE_MIN, as_tensor, inline_for, message_length, pack_message, rows_as_bytes

__all__ = ["CollectiveError", "Group", "Pending"]
_FLAT_GATHER_BYTES = 1 << 20  # CPU all-gathers up to this size go as one all-to-all: one round instead of size - 1


class Pending:
    """An exchange under way. ``wait`` gives its result; the buffers live as long as this object."""

    def __init__(
        self, group: Group, op: str, peers: Sequence[int], work: dist.Work | None, result: torch.Tensor, *keep: torch.Tensor
    ) -> None:
        self._group = group
        self._op = op
        self._peers = peers
        self._work = work
        self._result = result
        self._keep = keep

    def wait(self) -> torch.Tensor:
        """Block the host (CPU) or the current stream (CUDA) until the result is there. Raises CollectiveError."""
        work, self._work = self._work, None
        if work is not None:
            self._group._wait(self._op, self._peers, work)
            self._keep = ()
        return self._result

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work is None or self._work.is_completed()


class Group:
    """Ranks ``ranks`` (global numbers, ascending), of which this process is ``ranks[index]``.

    Tensor collectives take CPU or CUDA tensors; on CUDA they are ordered on the current stream and the host does not
    wait. Control messages are CPU bytes and integers; nothing received is ever unpickled. Calls of a group of one
    return at once. A call that fails or outlasts ``deadline_s`` raises ``CollectiveError`` naming who was missing.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], index: int, *, process_group: dist.ProcessGroup | None, deadline_s: float, progress: Progress
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = index
        self.size = len(self.ranks)
        self.deadline_s = deadline_s
        self.progress = progress
        self._pg = process_group
        self._inline = [INLINE_MIN] * self.size

    @classmethod
    def solo(cls, name: str = "solo", rank: int = 0, progress: Progress | None = None) -> Group:
        """A group of this rank alone; needs no torch.distributed."""
        return cls(name, (rank,), 0, process_group=None, deadline_s=0.0, progress=progress or Progress(rank=rank))

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Of torch.distributed, for libraries that set up their own connections over it; None in a group of one or when closed."""
        return self._pg

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks={list(self.ranks)}, index={self.index})"

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. On CPU: in rank order whatever the shape, in fp32 for 16-bit types."""
        if self.size == 1 or x.numel() == 0:
            return x
        if x.device.type != "cpu":
            self._run("all_reduce", lambda pg: pg.allreduce([x]))
            return x
        parts = self.all_gather(x.reshape(1, -1))
        narrow = x.dtype in (torch.bfloat16, torch.float16)
        total = parts[0].float() if narrow else parts[0]
        for part in parts[1:]:
            total += part
        return x.copy_(total.view(x.shape))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...], the same n everywhere -> [size * n, ...], in rank order."""
        return x if self.size == 1 else self.all_gather_async(x).wait()

    def all_gather_async(self, x: torch.Tensor) -> Pending:
        """As ``all_gather``, but returns at once; several may be under way, in the same order on every rank."""
        if self.size == 1:
            return Pending(self, "all_gather", self.ranks, None, x)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        if x.numel() == 0:
            return Pending(self, "all_gather", self.ranks, None, out)
        x = x.contiguous()
        if x.device.type == "cpu" and out.numel() * out.element_size() <= _FLAT_GATHER_BYTES:
            x, splits = torch.cat([x] * self.size), [x.shape[0]] * self.size
            work = self._start("all_gather", self.ranks, lambda pg: pg.alltoall_base(rows_as_bytes(out), rows_as_bytes(x), splits, splits))
        else:
            work = self._start("all_gather", self.ranks, lambda pg: pg._allgather_base(rows_as_bytes(out), rows_as_bytes(x)))
        return Pending(self, "all_gather", self.ranks, work, out, x)

    def all_gather_uneven(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """x [sizes[index], ...] -> [sum(sizes), ...], in rank order; ``sizes`` is known to every rank."""
        assert len(sizes) == self.size and x.shape[0] == sizes[self.index], (sizes, x.shape, self.index)
        most = max(sizes)
        if self.size == 1 or min(sizes) == most:
            return self.all_gather(x)
        if x.shape[0] < most:
            x = torch.cat([x, x.new_zeros((most - x.shape[0], *x.shape[1:]))])
        blocks = self.all_gather(x).unflatten(0, (self.size, most))  # type: ignore[no-untyped-call]
        return torch.cat([block[:n] for block, n in zip(blocks, sizes, strict=True)])

    def all_to_all(self, x: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> torch.Tensor:
        """Rows of x, ``in_splits[r]`` of them for rank r -> the ``out_splits[r]`` rows that rank r sent, in rank order."""
        return self.all_to_all_async(x, in_splits, out_splits).wait()

    def all_to_all_async(self, x: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> Pending:
        """As ``all_to_all``, but returns at once; several may be under way, in the same order on every rank."""
        assert len(in_splits) == len(out_splits) == self.size, (in_splits, out_splits, self.size)
        assert sum(in_splits) == x.shape[0], (in_splits, x.shape)
        if self.size == 1:
            return Pending(self, "all_to_all", self.ranks, None, x)
        x = x.contiguous()
        out = x.new_empty((sum(out_splits), *x.shape[1:]))
        outs, ins = list(out_splits), list(in_splits)
        work = self._start("all_to_all", self.ranks, lambda pg: pg.alltoall_base(rows_as_bytes(out), rows_as_bytes(x), outs, ins))
        return Pending(self, "all_to_all", self.ranks, work, out, x)

    def broadcast(self, x: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        """Fill the contiguous x in place with the x of rank ``ranks[src_index]``."""
        if self.size > 1 and x.numel():
            flat = rows_as_bytes(x.view(1, -1))
            self._run("broadcast", lambda pg: pg.broadcast(flat, src_index))
        return x

    def send_async(self, x: torch.Tensor, peer: int, tag: int = 0) -> Pending:
        """Start sending the contiguous x to rank ``ranks[peer]``; it must not change until the result is waited for."""
        flat = rows_as_bytes(x.view(1, -1))
        work = self._start("send", (self.ranks[peer],), lambda pg: pg.send([flat], peer, tag))
        return Pending(self, "send", (self.ranks[peer],), work, x, flat)

    def recv_async(self, x: torch.Tensor, peer: int, tag: int = 0) -> Pending:
        """Start filling the contiguous x with what rank ``ranks[peer]`` sends under ``tag``."""
        flat = rows_as_bytes(x.view(1, -1))
        work = self._start("recv", (self.ranks[peer],), lambda pg: pg.recv([flat], peer, tag))
        return Pending(self, "recv", (self.ranks[peer],), work, x, flat)

    # ---- control: small CPU messages ---------------------------------------------------------------------------------

    def gather_ints(self, values: Sequence[int]) -> NDArray[np.int64]:
        """All-gather n int64 values, the same n everywhere -> array [size, n]."""
        mine = torch.tensor(values, dtype=torch.int64).view(1, -1)
        result: NDArray[np.int64] = self.all_gather(mine).numpy()
        return result

    def broadcast_bytes(self, data: bytes | None, src_index: int = 0) -> bytes:
        """``data`` of rank ``ranks[src_index]``, everywhere: one message, unless it is far longer than the one before."""
        sends = self.index == src_index
        if sends and data is None:
            raise ValueError(f"broadcast_bytes in group {self.name}: the sender (index {src_index}) must give data, found None")
        payload = data or b""
        if self.size == 1:
            return payload
        inline = self._inline[src_index]
        head = pack_message(payload, inline) if sends else torch.empty(8 + inline, dtype=torch.uint8)
        self._run("broadcast_bytes", lambda pg: pg.broadcast(head, src_index))
        length = message_length(head)
        self._inline[src_index] = inline_for(length)
        parts = [head[8 : 8 + min(length, inline)]]
        if length > inline:
            rest = as_tensor(payload[inline:]) if sends else torch.empty(length - inline, dtype=torch.uint8)
            self._run("broadcast_bytes", lambda pg: pg.broadcast(rest, src_index))
            parts.append(rest)
        return payload if sends else b"".join(part.numpy().tobytes() for part in parts)

    def send_bytes(self, data: bytes, peer: int) -> None:
        """Send ``data`` to rank ``ranks[peer]``, which calls ``recv_bytes``. Returns when it has left."""
        self.send_async(pack_message(data, INLINE_MIN), peer, tag=1).wait()
        if len(data) > INLINE_MIN:
            self.send_async(as_tensor(data[INLINE_MIN:]), peer, tag=1).wait()

    def recv_bytes(self, peer: int) -> bytes:
        """Receive what rank ``ranks[peer]`` sent with ``send_bytes``."""
        head = self.recv_async(torch.empty(8 + INLINE_MIN, dtype=torch.uint8), peer, tag=1).wait()
        length = message_length(head)
        parts = [head[8 : 8 + min(length, INLINE_MIN)]]
        if length > INLINE_MIN:
            parts.append(self.recv_async(torch.empty(length - INLINE_MIN, dtype=torch.uint8), peer, tag=1).wait())
        return b"".join(part.numpy().tobytes() for part in parts)

    def barrier(self, name: str) -> None:
        """Wait for all ranks of the group; RuntimeError if they meet at barriers of different names."""
        marks = self.gather_ints([zlib.crc32(name.encode())])[:, 0]
        odd = [rank for rank, mark in zip(self.ranks, marks, strict=True) if mark != marks[self.index]]
        if odd:
            raise RuntimeError(f"rank {self.ranks[self.index]} is at barrier {name!r} of group {self.name}; ranks {odd} are at another one")

    def close(self) -> None:
        """Let go of the process group; later calls raise."""
        self._pg = None

    # ---- running with a deadline -------------------------------------------------------------------------------------

    def _run(self, op: str, launch: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        self._wait(op, self.ranks, self._start(op, self.ranks, launch))

    def _start(self, op: str, peers: Sequence[int], launch: Callable[[dist.ProcessGroup], dist.Work]) -> dist.Work:
        if self._pg is None:
            raise RuntimeError(f"group {self.name} {list(self.ranks)} is closed" if self.size > 1 else f"group {self.name} has no peers")
        (self.progress.enter if peers is self.ranks else self.progress.resume)(self.name, op, peers)
        try:
            return launch(self._pg)
        except RuntimeError as error:
            raise self._failure(op, peers, error) from error
        finally:
            self.progress.leave()

    def _wait(self, op: str, peers: Sequence[int], work: dist.Work) -> None:
        self.progress.resume(self.name, op, peers)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(op, peers, error) from error
        finally:
            self.progress.leave()

    def _failure(self, op: str, peers: Sequence[int], error: RuntimeError) -> CollectiveError:
        return collective_error(
            error, op=op, group=self.name, ranks=self.ranks, peers=peers, deadline_s=self.deadline_s, progress=self.progress
        )
