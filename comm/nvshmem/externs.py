"""NVSHMEM's device functions as Triton sees them: declarations only, the code is linked in from the installed bitcode.

A kernel that uses them is started by ``launch.launch``. Addresses are int64 (symmetric ones: of this rank's own copy),
sizes and signal values int64, PEs and operations int32; ``wide`` and ``narrow`` make them so. The ``_block`` functions are
carried out by all threads of a program together, the others by every thread on its own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import core

SIGNAL_SET = tl.constexpr(9)  # what signal_op and put with signal do to the signal word: NVSHMEM_SIGNAL_SET
_I32, _I64 = core.dtype("int32"), core.dtype("int64")


def _call(symbol: str, args: list[Any], types: tuple[Any, ...], result: Any, semantic: Any) -> Any:
    return core.extern_elementwise("", "", args, {types: (symbol, result)}, is_pure=False, _semantic=semantic)


@core.extern
def my_pe(_semantic=None):
    """Number of this PE."""
    return _call("nvshmem_my_pe", [], (), _I32, _semantic)


@core.extern
def n_pes(_semantic=None):
    """PEs there are."""
    return _call("nvshmem_n_pes", [], (), _I32, _semantic)


@core.extern
def ptr(address, pe, _semantic=None):
    """Where ``address`` of ``pe`` is mapped here, as int64; 0 if it is not."""
    return _call("nvshmem_ptr", [address, pe], (_I64, _I32), _I64, _semantic)


@core.extern
def putmem_nbi_block(dest, source, n_bytes, pe, _semantic=None):
    """Start copying ``n_bytes`` from ``source`` here to ``dest`` of ``pe``; ``quiet`` waits for it."""
    return _call("nvshmemx_putmem_nbi_block", [dest, source, n_bytes, pe], (_I64, _I64, _I64, _I32), _I32, _semantic)


@core.extern
def putmem_block(dest, source, n_bytes, pe, _semantic=None):
    """As ``putmem_nbi_block``, but ``source`` may be reused at once."""
    return _call("nvshmemx_putmem_block", [dest, source, n_bytes, pe], (_I64, _I64, _I64, _I32), _I32, _semantic)


_SIGNALLED = (_I64, _I64, _I64, _I64, _I64, _I32, _I32)


@core.extern
def putmem_signal_nbi_block(dest, source, n_bytes, signal, value, operation, pe, _semantic=None):
    """As ``putmem_nbi_block``, and then ``operation`` with ``value`` on the word at ``signal`` of ``pe``, after the bytes."""
    args = [dest, source, n_bytes, signal, value, operation, pe]
    return _call("nvshmemx_putmem_signal_nbi_block", args, _SIGNALLED, _I32, _semantic)


@core.extern
def putmem_signal_block(dest, source, n_bytes, signal, value, operation, pe, _semantic=None):
    """As ``putmem_signal_nbi_block``, but ``source`` may be reused at once."""
    return _call("nvshmemx_putmem_signal_block", [dest, source, n_bytes, signal, value, operation, pe], _SIGNALLED, _I32, _semantic)


@core.extern
def signal_op(signal, value, operation, pe, _semantic=None):
    """``operation`` with ``value`` on the word at ``signal`` of ``pe``, by every thread: use only SIGNAL_SET."""
    return _call("nvshmemx_signal_op", [signal, value, operation, pe], (_I64, _I64, _I32, _I32), _I32, _semantic)


@core.extern
def signal_wait_until(signal, comparison, value, _semantic=None):
    """Wait, without a limit, for the word at ``signal``; only for tests, rorqual's own waits have a deadline."""
    return _call("nvshmem_signal_wait_until", [signal, comparison, value], (_I64, _I32, _I64), _I64, _semantic)


@core.extern
def quiet(_semantic=None):
    """Wait until everything this thread started has arrived."""
    return _call("nvshmem_quiet", [], (), _I32, _semantic)


@core.extern
def fence(_semantic=None):
    """What was started before arrives, at each PE, before what is started after."""
    return _call("nvshmem_fence", [], (), _I32, _semantic)


@triton.jit
def wide(value):
    """``value`` as int64."""
    return tl.cast(value, tl.int64)


@triton.jit
def narrow(value):
    """``value`` as int32."""
    return tl.cast(value, tl.int32)
