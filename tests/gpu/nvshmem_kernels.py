"""Kernels of the tests of NVSHMEM: one for every device function that is declared."""

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.comm.nvshmem import externs


@triton.jit(do_not_specialize=["pe"])
def ask(out, address, pe):
    """out int64 [3]: this PE, how many there are, where ``address`` of ``pe`` is mapped."""
    tl.store(out, externs.my_pe().to(tl.int64))
    tl.store(out + 1, externs.n_pes().to(tl.int64))
    tl.store(out + 2, externs.ptr(externs.wide(address), externs.narrow(pe)))


@triton.jit(do_not_specialize=["pe", "n_bytes", "value", "how"])
def push(dest, source, n_bytes, signal, value, pe, how):
    """``n_bytes`` to ``dest`` of ``pe`` in one of four ways, and then ``value`` into its word at ``signal``."""
    to, size, what = externs.narrow(pe), externs.wide(n_bytes), externs.wide(value)
    set = externs.narrow(externs.SIGNAL_SET)
    if how == 0:
        externs.putmem_nbi_block(externs.wide(dest), externs.wide(source), size, to)
        externs.quiet()
        externs.signal_op(externs.wide(signal), what, set, to)
    elif how == 1:
        externs.putmem_block(externs.wide(dest), externs.wide(source), size, to)
        externs.fence()
        externs.signal_op(externs.wide(signal), what, set, to)
    elif how == 2:
        externs.putmem_signal_nbi_block(externs.wide(dest), externs.wide(source), size, externs.wide(signal), what, set, to)
        externs.quiet()
    else:
        externs.putmem_signal_block(externs.wide(dest), externs.wide(source), size, externs.wide(signal), what, set, to)


@triton.jit(do_not_specialize=["value"])
def pull(signal, value, source, out, N: tl.constexpr):
    """Wait for ``value`` in the word at ``signal``, then copy N bytes."""
    externs.signal_wait_until(externs.wide(signal), externs.narrow(5), externs.wide(value))
    tl.debug_barrier()
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(source + at, volatile=True))
