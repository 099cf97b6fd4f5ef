"""What the four kernels over symmetric memory share: the last program out, and waits that end."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ..state import Failure, Status
from ..wire import DISPATCH

_DISPATCH = tl.constexpr(DISPATCH)
_MISSED = tl.constexpr(int(Failure.MISSED))
_COUNT = tl.constexpr(int(Failure.COUNT))
_LEFT_OUT = tl.constexpr(int(Failure.LEFT_OUT))
_AT_FAILED = tl.constexpr(int(Status.FAILED))
_AT_PHASE = tl.constexpr(int(Status.PHASE))
_AT_EPOCH = tl.constexpr(int(Status.EPOCH))
_AT_MISSING = tl.constexpr(int(Status.MISSING))
_AT_SEEN = tl.constexpr(int(Status.SEEN))
_AT_TAG = tl.constexpr(int(Status.TAG))
_AT_CHANNEL = tl.constexpr(int(Status.CHANNEL))
_AT_COUNT = tl.constexpr(int(Status.COUNT))
_WRITING = tl.constexpr(-1)  # in the word FAILED while the others are being written
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def channel_of(pointers, rank, channel_at):
    """Address (int64) of a channel of ``rank``'s workspace; 0 if the rank is not mapped here."""
    base = tl.load(pointers + rank)
    return tl.where(base != 0, base + channel_at, 0)


@triton.jit
def pointer_at(address, dtype: tl.constexpr):
    """``address`` (int64, a multiple of 16) as a pointer whose alignment the compiler knows; it forgets that of the integer."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def may_send(status, active):
    """Whether this rank may still send: nothing failed, or all that did is a rank that a fault-tolerant wait gave up.

    Otherwise its results may be of tokens that did not all come, and its silence tells the others.
    """
    failed = tl.load(status + _AT_FAILED)
    missing = tl.load(status + _AT_MISSING)
    return (failed == 0) | ((failed == _MISSED) & (tl.load(active + missing) == 0))


@triton.jit
def is_last(arrived):
    """Whether this program is the last of its launch to get here; then everything the others stored before is seen by it.

    The barrier puts the stores of all warps before the one that counts; counting releases them and acquires the others'.
    Leaves ``arrived`` at 0 for the next launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def raise_flags(base, there, flag_at, n, epoch, RANKS: tl.constexpr, ON_GPU: tl.constexpr):
    """(epoch, n) into the flags at ``base + flag_at`` of the peers that are ``there``, released to the whole system.

    ``base`` int64 [RANKS], ``there`` [RANKS], which were loaded early: nothing is on its way here but the flags. On a GPU up to
    32 ranks get both words by one store of 16 bytes, which arrives as a whole; otherwise the count must have arrived before the
    epoch may go, which takes a turn over the link.
    """
    if ON_GPU and RANKS <= 32:  # lane i of every warp has the address of rank i; the first warp stores
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; .reg .b128 both; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; setp.ne.and.s32 p, $4, 0, p;"
            " mov.b128 both, {$2, $3}; @p st.release.sys.global.b128 [$1], both; mov.b32 $0, 0; }",
            "=r,l,l,l,r",
            [base + flag_at, tl.zeros_like(base) + epoch, tl.zeros_like(base) + n, there.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        flag = (base + flag_at).to(tl.pointer_type(tl.int64))
        tl.store(flag + 1, tl.zeros_like(base) + n, mask=there)
        tl.debug_barrier()  # the lanes of the two stores need not be the same threads
        tl.atomic_xchg(flag, tl.zeros_like(base) + epoch, mask=there, sem="release", scope="sys")


@triton.jit
def _now(CLOCK: tl.constexpr, LANES: tl.constexpr):
    """Nanoseconds, the same in all threads of the program; 0 without a clock."""
    if CLOCK:  # every thread reads the timer by itself; the maximum makes them agree, or they would leave a loop at different turns
        return tl.max((tl.arange(0, LANES) * 0).to(tl.int64) + globaltimer(), 0)
    else:
        return tl.zeros((), tl.int64)


@triton.jit
def report(status, failure, phase, epoch, missing, seen, count, tag, channel):
    """Write what went wrong, unless something was written before; only a missed rank gives way to what is worse."""
    nothing = tl.zeros((), tl.int64)
    word = status + _AT_FAILED
    found = tl.atomic_cas(word, nothing, nothing + _WRITING, sem="relaxed", scope="gpu")
    if (found == _MISSED) & (failure != _MISSED):
        found = tl.atomic_cas(word, found, nothing + _WRITING, sem="relaxed", scope="gpu") - _MISSED
    if found == 0:
        tl.store(status + _AT_PHASE, phase)
        tl.store(status + _AT_EPOCH, epoch)
        tl.store(status + _AT_MISSING, missing)
        tl.store(status + _AT_SEEN, seen)
        tl.store(status + _AT_TAG, tag)
        tl.store(status + _AT_CHANNEL, channel)
        tl.store(status + _AT_COUNT, count)
        tl.debug_barrier()
        tl.atomic_xchg(word, nothing + failure, sem="release", scope="sys")


@triton.jit
def wait_flags(
    flags, wanted, ranks, n_ranks, epoch, active, status, limit, phase, tag, channel,
    TOLERANT: tl.constexpr, CLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Wait until the flags of ``ranks`` [N] that are ``wanted`` [N] have ``epoch``, but not longer than ``limit``.

    ``flags`` points at this rank's (epoch, count) pairs of the phase. ``limit`` is in nanoseconds, or in turns without a CLOCK.
    Returns which of the wanted ones came, [N]. What is missing, or ahead, is reported. After a report every later wait ends at
    its first look; a TOLERANT program makes missing ranks inactive instead. It waits ``limit`` for each of the ranks that it has
    nothing of: those that wait for a dead rank themselves come in that time, each after one rank less.
    """
    flag = flags + 2 * ranks
    nothing = (ranks * 0).to(tl.int64)
    seen = tl.atomic_add(flag, nothing, mask=wanted, sem="acquire", scope="sys")
    missing = tl.sum((wanted & (seen < epoch)).to(tl.int32), 0)
    if missing > 0:
        start = _now(CLOCK, LANES)
        spent = tl.zeros((), tl.int64)
        broken = tl.zeros((), tl.int32)
        patience = tl.zeros((), tl.int64) + limit
        while (missing > 0) & (spent < patience) & (broken == 0):
            seen = tl.atomic_add(flag, nothing, mask=wanted, sem="acquire", scope="sys")
            missing = tl.sum((wanted & (seen < epoch)).to(tl.int32), 0)
            spent = _now(CLOCK, LANES) - start if CLOCK else spent + 1
            # a maximum again: threads may read the word before and after it changes
            word = tl.max(tl.load(status + _AT_FAILED + tl.arange(0, LANES) * 0, volatile=True), 0)
            broken = (word > _MISSED).to(tl.int32) if TOLERANT else (word != 0).to(tl.int32)
            if TOLERANT:
                if spent >= limit:  # atomics, so that all threads see the same
                    takes_part = tl.atomic_add(active + ranks, ranks * 0, mask=ranks < n_ranks, sem="relaxed", scope="gpu") != 0
                    all_seen = tl.atomic_add(flag, nothing, mask=ranks < n_ranks, sem="relaxed", scope="sys")
                    behind = (ranks < n_ranks) & takes_part & (all_seen < epoch)
                    patience = limit * tl.sum(behind.to(tl.int64), 0)
        if (missing > 0) & (broken == 0):
            late = wanted & (seen < epoch)
            first = tl.min(tl.where(late, ranks, _NOBODY), 0)
            last_seen = tl.sum(tl.where(ranks == first, seen, 0), 0)
            report(status, _MISSED, phase, epoch, first, last_seen, 0, tag, channel)
            if TOLERANT:
                tl.store(active + ranks, ranks * 0, mask=late)
    ahead = wanted & (seen > epoch)
    if tl.max(ahead.to(tl.int32), 0) > 0:
        first = tl.min(tl.where(ahead, ranks, _NOBODY), 0)
        report(status, _LEFT_OUT, phase, epoch, first, tl.sum(tl.where(ranks == first, seen, 0), 0), 0, tag, channel)
    return wanted & (seen == epoch)


@triton.jit
def checked_count(flags, source, epoch, most, status, tag, channel):
    """The count beside the dispatch flag of ``source``, 0 if it is outside 0..most; that is reported."""
    n = tl.load(flags + 2 * source + 1)
    if (n < 0) | (n > most):
        report(status, _COUNT, _DISPATCH, epoch, source, epoch, n, tag, channel)
        n = n * 0
    return n
