"""When a kernel that calls NVSHMEM may be loaded and launched; with Triton's real chains of hooks, and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from rorqual.comm.nvshmem import launch as under_test
from rorqual.comm.nvshmem.launch import Modules, launch, uses_nvshmem


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No runtime, no module, and the chains as they were."""
    chains = (triton.knobs.runtime.kernel_load_start_hook, triton.knobs.runtime.kernel_load_end_hook)
    before = [list(chain.calls) for chain in chains]
    under_test._modules, under_test._loaded = None, {}
    yield
    under_test._modules, under_test._loaded = None, {}
    for chain, calls in zip(chains, before, strict=True):
        chain.calls[:] = calls


def compiled(tmp_path: Path, name: str, *, linked: bool) -> dict[str, str]:
    """The files of a compiled kernel as Triton hands them to hooks."""
    cubin = tmp_path / f"{name}.cubin"
    cubin.write_bytes(b"\x7fELF....nvshmemi_device_state_d\0" if linked else b"\x7fELF....something_else\0")
    (tmp_path / f"{name}.json").write_text("nvshmemi_device_state_d")
    return {f"{name}.cubin": str(cubin), f"{name}.json": str(tmp_path / f"{name}.json")}


def load(files: dict[str, str], handle: int, name: str = "kernel") -> None:
    """What Triton does around loading a module."""
    triton.knobs.runtime.kernel_load_start_hook(None, None, name, files, "hash")
    triton.knobs.runtime.kernel_load_end_hook(handle, 99, name, files, "hash")


def test_only_linked_kernels_count(tmp_path: Path) -> None:
    assert uses_nvshmem(compiled(tmp_path, "a", linked=True)) and not uses_nvshmem(compiled(tmp_path, "b", linked=False))


def test_each_module_is_prepared_once_when_it_is_loaded(tmp_path: Path) -> None:
    others: list[str] = []

    def other(module: Any, function: Any, name: str, group: Any, hash: str) -> None:
        others.append(name)

    triton.knobs.runtime.kernel_load_end_hook.add(other)
    handles: list[int] = []
    modules = Modules(Path("x.bc"), lambda handle: handles.append(handle))
    modules.open()
    load(compiled(tmp_path, "a", linked=True), 11, "a")
    load(compiled(tmp_path, "b", linked=False), 12, "b")
    load(compiled(tmp_path, "c", linked=True), 13, "c")
    assert handles == [11, 13] and modules.names == ["a", "c"] and others == ["a", "b", "c"]
    modules.refresh()
    assert handles == [11, 13, 11, 13]


def test_modules_of_an_earlier_runtime_are_prepared_again(tmp_path: Path) -> None:
    first = Modules(Path("x.bc"), lambda handle: 0)
    first.open()
    load(compiled(tmp_path, "a", linked=True), 11, "a")
    with pytest.raises(RuntimeError, match="one runtime per process"):
        Modules(Path("x.bc"), lambda handle: 0).open()
    first.close()
    handles: list[int] = []
    second = Modules(Path("x.bc"), lambda handle: handles.append(handle))
    second.open()
    first.close()  # a second time: not the one that runs
    assert handles == [11] and second.names == ["a"] and under_test._modules is second


def test_no_load_without_a_runtime(tmp_path: Path) -> None:
    modules = Modules(Path("x.bc"), lambda handle: 0)
    modules.open()
    modules.close()
    with pytest.raises(RuntimeError, match="kernel k calls NVSHMEM, which is not running in this process"):
        load(compiled(tmp_path, "a", linked=True), 11, "k")
    load(compiled(tmp_path, "b", linked=False), 12)


def test_no_load_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[int] = []
    Modules(Path("x.bc"), lambda handle: handles.append(handle)).open()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    files = compiled(tmp_path, "a", linked=True)
    with pytest.raises(RuntimeError, match="kernel k .* would be loaded while a CUDA graph is captured: run it once before"):
        load(files, 11, "k")
    assert handles == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    load(files, 11, "k")
    assert handles == [11]


def test_nothing_is_launched_after_a_module_was_refused(tmp_path: Path) -> None:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError("launched")

    Modules(Path("x.bc"), lambda handle: 7).open()
    with pytest.raises(RuntimeError, match=r"NVSHMEM refused the module of kernel k \(status 7\)"):
        load(compiled(tmp_path, "a", linked=True), 11, "k")
    with pytest.raises(RuntimeError, match="NVSHMEM refused the module of kernel k"):
        launch(Kernel(), (1,))
    with pytest.raises(RuntimeError, match="NVSHMEM refused the module of kernel k"):
        load(compiled(tmp_path, "b", linked=True), 12, "other")


def test_launch_links_the_bitcode() -> None:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: (grid, args, options)

    with pytest.raises(RuntimeError, match="make the symmetric heap before its kernels are launched"):
        launch(Kernel(), (3,))
    Modules(Path("/lib/x.bc"), lambda handle: 0).open()
    assert launch(Kernel(), (3,), 1, 2, num_warps=4) == ((3,), (1, 2), {"extern_libs": {"libnvshmem_device": "/lib/x.bc"}, "num_warps": 4})
