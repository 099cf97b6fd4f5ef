"""Kernels that call NVSHMEM, compiled and linked with the installed bitcode; without a GPU, and without being run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from rorqual.comm.nvshmem.kernels.put_home import put_home_kernel
from rorqual.comm.nvshmem.kernels.put_tokens import put_tokens_kernel
from rorqual.comm.nvshmem.library import Library, find
from tests.kernels.offline import Spec, compile_reports


def _installed() -> Library | None:
    try:
        return find()
    except ValueError:
        return None


LIBRARY = _installed()
pytestmark = [
    pytest.mark.slow,  # the bitcode has 31 MB, and is read and optimised for every kernel
    pytest.mark.skipif(LIBRARY is None, reason="NVSHMEM's wheel is not installed, and NVSHMEM_HOME is not set"),
]
POINTERS = {
    "pointers": "*i64", "active": "*i32", "epochs": "*i64", "arrived": "*i32", "status": "*i64", "sent": "*i64",
    "slots": "*i32", "index": "*i32", "shares": "*fp32", "ring": "i64",
}  # fmt: skip


def spec(fn: Any, where: str, constexprs: dict[str, Any], arch: int = 90, **types: str) -> Spec:
    assert LIBRARY is not None
    names = [name for name in fn.arg_names if name not in constexprs]
    signature = {name: types.get(name, POINTERS.get(name, "i32")) for name in names}
    options = {"extern_libs": {"libnvshmem_device": str(LIBRARY.bitcode)}, "num_warps": 4}
    return Spec(fn=f"rorqual.comm.nvshmem.kernels.{where}", signature=signature, constexprs=constexprs, options=options, arch=arch)


HOME = {"WIDTH": 7168, "UNIT": 8, "BLOCK": 2048, "K": 8, "CHOICES": 8}


def check(one: Spec) -> None:
    (report,) = compile_reports([one])
    assert report.registers <= 255 and report.shared <= 1024
    assert report.count("MEMBAR") > 0 and len(report.sass) > 10_000, "the library's code is not in it"


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_put_tokens_links(arch: int) -> None:
    check(spec(put_tokens_kernel, "put_tokens:put_tokens_kernel", {"K": 8, "CHOICES": 8}, arch))


@pytest.mark.parametrize(("mode", "arch"), [("sum", 80), ("sum", 90), ("sum", 100), ("rows", 90), ("each", 90)])
def test_put_home_links(mode: str, arch: int) -> None:
    types = {"y": "*bf16"} if mode == "sum" else {"y": "*i16"}
    constexprs = {**HOME, "MODE": mode, "OUT": "tl.bfloat16" if mode == "sum" else "tl.int16"}
    check(spec(put_home_kernel, "put_home:put_home_kernel", constexprs, arch, **types))
