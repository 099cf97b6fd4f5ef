"""Starting Triton kernels that call NVSHMEM: the bitcode is linked in, and every module is prepared before its first launch.

A compiled module carries its own copy of the device library's state (heap addresses, transports). It has to be filled
after the module is loaded and before anything in it runs; a kernel that runs without reads address 0 or worse. Triton
tells about every module it loads (``kernel_load_start_hook`` and ``kernel_load_end_hook``, chains that others may be on
too), and that is where it is done here, for every kernel that contains NVSHMEM, whoever launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

_STATE = b"nvshmemi_device_state_d"  # the symbol of that copy: in the cubin of every kernel that calls NVSHMEM
_LIBRARY = "libnvshmem_device"  # key of ``extern_libs``


class Modules:
    """The loaded modules that hold NVSHMEM state. The runtime of this process has one, while it runs.

    ``init`` fills the state of a module handle and returns 0 on success; it waits for the device, so it may not happen
    while a CUDA graph is captured.
    """

    def __init__(self, bitcode: Path, init: Callable[[int], int | None]) -> None:
        self.bitcode = str(bitcode)
        self._init = init
        self._handles: dict[int, str] = {}  # module -> kernel
        self._broken = ""  # why a module could not be prepared

    @property
    def names(self) -> list[str]:
        """Kernels whose modules were prepared, in the order of loading."""
        return list(self._handles.values())

    def open(self) -> None:
        """Start to listen, and prepare the modules that earlier runtimes of this process left loaded."""
        global _modules
        if _modules is not None:
            raise RuntimeError("NVSHMEM modules are looked after already: there is one runtime per process")
        _modules = self
        triton.knobs.runtime.kernel_load_start_hook.add(_before_load)
        triton.knobs.runtime.kernel_load_end_hook.add(_after_load)
        for handle, name in _loaded.items():
            self.prepare(handle, name)

    def close(self) -> None:
        """Stop serving launches; the hooks stay, so that a kernel launched without a runtime is still refused."""
        global _modules
        if _modules is self:
            _modules = None

    def refresh(self) -> None:
        """Fill all modules again, after the symmetric heap has grown."""
        for handle, name in list(self._handles.items()):
            self.prepare(handle, name)

    def prepare(self, handle: int, name: str) -> None:
        """Fill the state of one module. RuntimeError if NVSHMEM refuses it; no kernel is launched after that."""
        status = self._init(handle)
        if status:
            self._broken = f"NVSHMEM refused the module of kernel {name} (status {status}): host library and bitcode {self.bitcode} differ?"
            raise RuntimeError(self._broken)
        self._handles[handle] = name
        _loaded[handle] = name

    def check(self) -> None:
        """Raise RuntimeError if a module could not be prepared."""
        if self._broken:
            raise RuntimeError(self._broken)


_modules: Modules | None = None  # of the runtime of this process
_loaded: dict[int, str] = {}  # every module with NVSHMEM state that Triton has loaded


def uses_nvshmem(metadata_group: dict[str, Any]) -> bool:
    """Whether a compiled kernel, given by the files Triton keeps of it, calls NVSHMEM."""
    return any(str(path).endswith(".cubin") and _STATE in Path(path).read_bytes() for path in metadata_group.values())


def _before_load(module: Any, function: Any, name: str, metadata_group: dict[str, Any], hash: str) -> None:
    """Refuse what could not be prepared afterwards: Triton tries to load again at the next launch."""
    if not uses_nvshmem(metadata_group):
        return
    if _modules is None:
        raise RuntimeError(f"kernel {name} calls NVSHMEM, which is not running in this process: make the symmetric heap first")
    _modules.check()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"kernel {name} calls NVSHMEM and would be loaded while a CUDA graph is captured: run it once before")


def _after_load(module: Any, function: Any, name: str, metadata_group: dict[str, Any], hash: str) -> None:
    if _modules is not None and uses_nvshmem(metadata_group):
        _modules.prepare(int(module), name)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """``kernel[grid](*args, **options)`` with the device library linked in. Returns the compiled kernel.

    Raises RuntimeError if no runtime is there, if a module could not be prepared, and if a kernel would be loaded while a
    graph is captured. The first launch of a kernel takes seconds: the bitcode is read, optimised and compiled.
    """
    if _modules is None:
        raise RuntimeError("NVSHMEM is not running in this process: make the symmetric heap before its kernels are launched")
    _modules.check()
    return kernel[grid](*args, extern_libs={_LIBRARY: _modules.bitcode}, **options)
