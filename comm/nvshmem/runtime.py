"""NVSHMEM's runtime in this process: started over a group of ranks by the first heap, and shared by all.

Memory of NVSHMEM can only be given back by all PEs together. A heap that closes therefore leaves its memory here, for the
next one of the same size, and no rank waits for another: a rank that fails can leave alone. ``stop`` ends it in good order.
"""

from __future__ import annotations

import os
import platform
import zlib
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...parallel.group import Group
from .bounded import bounded
from .launch import Modules
from .library import Library, Version, bindings_version, check_versions, find, packages, parse_version, text_of

#: settings of the environment that NVSHMEM reads when it starts; those in FORCED hold whatever was set before
FORCED = {"NVSHMEM_DISABLE_NVLS": "1"}  # nothing here uses multicast, and it fails for several PEs on one GPU
DEFAULTS = {"NVSHMEM_DISABLE_NCCL": "1"}  # its collectives, which could use NCCL, are not called
ONE_HOST = {"NVSHMEM_REMOTE_TRANSPORT": "none"}  # a world inside one host needs no network
_SHARING = {  # what ``nvshmemx_init_status`` says about several PEs on one GPU
    "STATUS_IS_INITIALIZED": "one PE a GPU",
    "STATUS_LIMITED_MPG": "several PEs on one GPU, time-sliced (no MPS, or its thread percentages exceed 100)",
    "STATUS_FULL_MPG": "several PEs on one GPU under MPS",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """One allocation: the same number and size on every PE."""

    number: int  # from 0, in the order in which all PEs made them
    bytes: torch.Tensor  # uint8, of this PE


@dataclass(kw_only=True)
class Runtime:
    """PEs are the indices of ``group``. Got by ``start``."""

    group: Group
    device: torch.device
    library: Library  # whose bitcode kernels are linked with
    host_version: Version  # of the host library that was loaded
    sharing: str  # one PE a GPU, or several and how
    core: Any  # the module nvshmem.core
    bindings: Any  # the module nvshmem.bindings
    modules: Modules
    spare: list[Space] = field(default_factory=list)  # memory that closed heaps left, oldest first
    made: int = 0  # spaces made so far

    def describe(self) -> str:
        """Versions and sharing in one line."""
        device, host = text_of(self.library.version), text_of(self.host_version)
        return f"NVSHMEM host {host}, device bitcode {device}, nvshmem4py {bindings_version()}, {self.group.size} PEs, {self.sharing}"


_runtime: Runtime | None = None  # there is one per process


def running() -> Runtime | None:
    """The runtime of this process, None before the first heap and after ``stop``."""
    return _runtime


def start(group: Group, device: torch.device) -> Runtime:
    """The runtime of this process, started if need be. Collective over ``group``.

    Raises ValueError, on every rank, if NVSHMEM cannot be used on one of them (what is missing or mixed is said), and if a
    runtime over other ranks is there already; RuntimeError if NVSHMEM fails to start.
    """
    global _runtime
    if _runtime is None:
        _runtime = _start(group, device)
    elif _runtime.group.ranks != group.ranks or _runtime.device != device:
        raise ValueError(
            f"NVSHMEM runs over ranks {list(_runtime.group.ranks)} on {_runtime.device} in this process and cannot be started a "
            f"second time, for ranks {list(group.ranks)} on {device}: give all dispatchers of a process the same expert group"
        )
    return _runtime


def stop() -> None:
    """Give all memory back and end the runtime of this process, if there is one; its heaps must be closed. Collective.

    CollectiveError if a rank does not come: then NVSHMEM is left as it is, and its memory goes with the process.
    """
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is None:
        return
    runtime.modules.close()
    torch.cuda.synchronize(runtime.device)
    runtime.group.barrier("nvshmem stop")
    with bounded(runtime.group, "nvshmem stop"):
        for space in runtime.spare:
            runtime.core.interop.torch.free_tensor(space.bytes)
        runtime.spare.clear()
        runtime.core.finalize()


def take(runtime: Runtime, n_bytes: int) -> Space:
    """Zeroed symmetric memory: what a closed heap left, or new. Collective; the ranks leave it together.

    Raises ValueError if the ranks ask for different sizes, MemoryError on all of them if there is no room on one.
    """
    group = runtime.group
    fit = next((space for space in runtime.spare if space.bytes.numel() == n_bytes), None)
    table = group.gather_ints([n_bytes, fit.number if fit is not None else -1])
    if (table[:, 0] != n_bytes).any():
        found = ", ".join(f"{size} on rank {rank}" for rank, size in zip(group.ranks, table[:, 0].tolist(), strict=True))
        raise ValueError(f"symmetric memory must have the same size everywhere, found {found} bytes")
    if fit is not None and (table[:, 1] == fit.number).all():
        runtime.spare.remove(fit)
        fit.bytes.zero_()
        torch.cuda.synchronize(runtime.device)
        group.barrier("nvshmem memory")
        return fit
    return _make(runtime, n_bytes)


def _make(runtime: Runtime, n_bytes: int) -> Space:
    group, tensor, trouble = runtime.group, None, None
    with bounded(group, "nvshmem malloc"):
        try:
            tensor = runtime.core.interop.torch.tensor((n_bytes,), dtype=torch.uint8, except_on_del=False)
        except Exception as error:  # nvshmem4py's own classes, whose base is Exception
            trouble = error
    if tensor is not None:
        tensor.zero_()
    runtime.modules.refresh()  # the heap may have grown
    torch.cuda.synchronize(runtime.device)
    fine = group.gather_ints([tensor is not None])[:, 0]  # also the barrier: zeroed everywhere
    if tensor is None or not fine.all():
        bad = [rank for rank, ok in zip(group.ranks, fine, strict=True) if not ok]
        free = torch.cuda.mem_get_info(runtime.device)[0] >> 20
        raise MemoryError(f"NVSHMEM has no room for {n_bytes} symmetric bytes on ranks {bad} ({free} MiB are free here)") from trouble
    runtime.made += 1
    return Space(number=runtime.made - 1, bytes=tensor)


def load(cuda: str | None) -> tuple[Library, Any, Any, Version]:
    """(installation, nvshmem.core, nvshmem.bindings, version of the host library that gets loaded). Starts nothing.

    Raises ValueError saying what is missing, mixed or cannot be loaded, and what to install.
    """
    library = find(cuda=cuda)
    bindings_version()
    try:
        core, bindings = import_module("nvshmem.core"), import_module("nvshmem.bindings")
        import_module("nvshmem.core.interop.torch")
        host = parse_version(core.get_version().libnvshmem_version)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"nvshmem4py does not load ({type(error).__name__}: {error}). Install it with `{packages(cuda)}`") from error
    check_versions(library.version, host)
    return library, core, bindings, host


def _start(group: Group, device: torch.device) -> Runtime:
    """Every step that may fail on one rank is followed by an exchange, so that it raises on all."""
    trouble, parts = "", None
    try:
        if device.type != "cuda":
            raise ValueError(f"NVSHMEM needs a CUDA device, found {device}")
        parts = load(torch.version.cuda)
    except ValueError as error:
        trouble = str(error)
    host = zlib.crc32(platform.node().encode())
    mine = parts[3] if parts is not None else (0, 0, 0)
    table = group.gather_ints([parts is not None, host, *mine])
    bad = [rank for rank, row in zip(group.ranks, table, strict=True) if not row[0]]
    if trouble:
        raise ValueError(trouble)
    if bad:
        raise ValueError(f"NVSHMEM cannot be used on ranks {bad}; their own messages say why")
    if len({tuple(row[2:]) for row in table.tolist()}) > 1:
        found = ", ".join(f"{text_of(tuple(row[2:]))} on rank {rank}" for rank, row in zip(group.ranks, table.tolist(), strict=True))
        raise ValueError(f"the ranks load different versions of NVSHMEM: {found}")
    assert parts is not None
    library, core, bindings, version = parts
    _set_environment(one_host=len(set(table[:, 1].tolist())) == 1)
    _initialise(group, device, core)
    modules = Modules(library.bitcode, bindings.cumodule_init)
    modules.open()
    return Runtime(
        group=group, device=device, library=library, host_version=version, sharing=_sharing(core),
        core=core, bindings=bindings, modules=modules,
    )  # fmt: skip


def _set_environment(*, one_host: bool) -> None:
    os.environ.update(FORCED)
    for name, value in (DEFAULTS | (ONE_HOST if one_host else {})).items():
        os.environ.setdefault(name, value)


def _initialise(group: Group, device: torch.device, core: Any) -> None:
    """Rank 0 makes an id, the others get it over the group, all start together."""
    place = _place(device)
    uid = core.get_unique_id(empty=group.index != 0)
    data = group.broadcast_bytes(uid._data.tobytes() if group.index == 0 else None)
    if len(data) != uid._data.nbytes:
        raise RuntimeError(
            f"NVSHMEM's id has {uid._data.nbytes} bytes on rank {group.ranks[group.index]}, but {len(data)} came from rank {group.ranks[0]}"
        )
    uid._data[:] = np.frombuffer(data, dtype=uid._data.dtype)
    trouble: Exception | None = None
    with bounded(group, "nvshmem init"):
        try:
            core.init(device=place, uid=uid, rank=group.index, nranks=group.size, initializer_method="uid")
        except Exception as error:  # whatever it is, the others have to hear of it
            trouble = error
    status = group.gather_ints([trouble is None])[:, 0]
    if trouble is not None:
        raise RuntimeError(
            f"NVSHMEM does not start on rank {group.ranks[group.index]} ({device}): {type(trouble).__name__}: {trouble}"
        ) from trouble
    if not status.all():
        bad = [rank for rank, ok in zip(group.ranks, status, strict=True) if not ok]
        raise RuntimeError(f"NVSHMEM did not start on ranks {bad}; their own messages say why")


def _place(device: torch.device) -> Any:
    """``device`` in the terms of nvshmem4py, made current with the context that torch uses."""
    from cuda.core import Device  # a dependency of nvshmem4py

    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    place = Device(device.index or 0)
    place.set_current()
    return place


def _sharing(core: Any) -> str:
    status = core.init_status()
    name = str(getattr(status, "name", None) or core.InitStatus(int(status)).name)
    return _SHARING.get(name, name)
