"""What a Triton (or Gluon) kernel compiles to, for sm_90a if not said otherwise, found without a GPU: registers, spills, PTX, SASS.

Compiles run in a process of their own, because tests import Triton in interpreter mode, where ``@triton.jit`` gives something else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMEM_LIMIT = 227 * 1024


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One compile. ``fn`` is "package.module:function"."""

    fn: str
    signature: dict[str, str]  # argument -> Triton type ("*fp32", "*fp8e4nv", "*i8", "i32", ..); constexprs are added
    constexprs: dict[str, Any]  # plain values; "tl.float32" and the like name Triton types
    aligned: tuple[str, ...] = ()  # pointers and integers known to be multiples of 16
    gluon: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # num_warps, num_stages, maxnreg ..
    arch: int = 90  # 10 times the compute capability


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel."""

    registers: int  # a thread
    spill_bytes: int  # local memory a thread
    shared: int  # bytes a program
    sass: str  # disassembly
    ptx: str = ""  # what it was assembled from
    ttir: str = ""  # what Triton made of its source; empty for Gluon, which begins with layouts

    def count(self, instruction: str) -> int:
        """How often an instruction occurs: ``HGMMA``, ``QGMMA``, ``HMMA``, ``LDGSTS``, ``UTMALDG`` ..."""
        return len(re.findall(rf"\b{instruction}\b", self.sass))


def compile_reports(specs: Sequence[Spec]) -> list[Report]:
    """Compile each, all in one process without interpreter mode. A compile error fails the caller with its message."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from tests.kernels.offline import _main; _main(sys.stdin.read())"],
        input=json.dumps([asdict(spec) for spec in specs]),
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Report(**entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def compile_report(fn: str, signature: dict[str, str], constexprs: dict[str, Any], **more: Any) -> Report:
    """One of ``compile_reports``; ``more`` are aligned, gluon, options."""
    return compile_reports([Spec(fn=fn, signature=signature, constexprs=constexprs, **more)])[0]


def _value(value: Any) -> Any:
    import triton.language as tl

    return getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value


def _compile(spec: Spec) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource as Source

    if spec.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source  # noqa: N813
    module, name = spec.fn.split(":")
    fn = getattr(import_module(module), name)
    fn = getattr(fn, "fn", fn) if type(fn).__name__ in ("Autotuner", "Heuristics") else fn
    names = list(fn.arg_names)
    full = {n: "constexpr" if n in spec.constexprs else spec.signature[n] for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in spec.aligned}
    constants = {(names.index(n),): _value(v) for n, v in spec.constexprs.items()}
    compiled = triton.compile(Source(fn, full, constants, attrs), target=GPUTarget("cuda", spec.arch, 32), options=spec.options)
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    kept = "\n".join(line.split("/*", 2)[1].split("*/")[-1] for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ +\S", line))
    ttir = str(compiled.asm["ttir"]) if "ttir" in compiled.asm else ""
    return Report(found["REG"], found["STACK"] + found["LOCAL"], int(compiled.metadata.shared), kept, compiled.asm["ptx"], ttir)


def _main(text: str) -> None:
    import tests.conftest  # noqa: F401  makes rorqual importable from a bare checkout

    specs = [Spec(**{**entry, "aligned": tuple(entry["aligned"])}) for entry in json.loads(text)]
    print(json.dumps([asdict(_compile(spec)) for spec in specs]))
