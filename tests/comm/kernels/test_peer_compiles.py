"""What the kernels over peer memory compile to, without a GPU: no spills, wide stores, flags with system scope."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from rorqual.comm.kernels.launching import registers_of
from tests.kernels.offline import SMEM_LIMIT, Report, Spec, compile_reports

_TYPES = {
    **dict.fromkeys(("pointers", "epoch", "sent", "status"), "*i64"),
    **dict.fromkeys(("active", "arrived", "ids", "slots", "index", "n_valid"), "*i32"),
    **dict.fromkeys(("weights", "scales", "shares"), "*fp32"),
    **dict.fromkeys(("limit", "channel_at", "ids_at", "weights_at", "rows_at", "home_at"), "i64"),
}
_SEND = ("pointers", "active", "epoch", "arrived", "sent", "status")
_WHERE = ("n_ranks", "me", "channel", "channel_at", "flag_at")


def spec(kernel: str, names: tuple[str, ...], types: dict[str, str], constexprs: dict[str, Any], warps: int, arch: int) -> Spec:
    signature = {name: {**_TYPES, **types}.get(name, "i32") for name in names if name not in constexprs}
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*") or name in ("x_pitch", "y_pitch", "out_pitch"))
    return Spec(
        fn=f"rorqual.comm.kernels.{kernel}:{kernel}_kernel", signature=signature, constexprs=constexprs, aligned=aligned, arch=arch,
        options={"num_warps": warps, "maxnreg": registers_of(warps)},
    )  # fmt: skip


def send(arch: int, offsets: str = "i64", **more: Any) -> Spec:
    names = (*_SEND, *_WHERE, "x", "scales", "ids", "weights", "n_valid", "n_tokens", "first_row", "ids_at", "weights_at", "rows_at")
    names += ("row_bytes", "slots_per_rank", "x_pitch", "scales_pitch", "scales_step")
    fp8 = {"WIDTH": 7168, "UNIT": 8, "TOKENS": 8, "GROUPS": 8, "COLS": 128, "QUANTISE": True, "UE8M0": False, "FIXES": 1}
    shape = {"K": 8, "CHOICES": 128, "RANKS": 8, "MANY": False, "CAST": False, "ON_GPU": True}
    shape |= {"SCALES": 0, "BLOCKS": 1, "SCALES_AT": 1792, "scales": None, "EARLY": arch >= 90}
    constexprs = {**fp8, **shape, **more}
    types = {"x": "*bf16" if constexprs["QUANTISE"] else "*i32", "channel_at": offsets, "rows_at": offsets}
    return spec("send_tokens", names, types, constexprs, 16, arch)


def receive(arch: int) -> Spec:
    names = (*_SEND[:3], "status", *_WHERE[:4], "slots", "shares", "tag", "limit", "ids_at", "weights_at", "max_tokens", "slots_per_rank")
    constexprs = {"K": 8, "RANKS": 8, "BLOCK": 2048, "TOLERANT": True, "CLOCK": True, "LANES": 128, "EARLY": arch >= 90}
    return spec("receive_tokens", (*names, "blocks"), {}, constexprs, 4, arch)


def home(arch: int, mode: str) -> Spec:
    names = (*_SEND, *_WHERE, "y", "slots", "index", "shares", "home_at", "home_step", "home_pitch", "max_tokens", "y_pitch")
    shape = {"TOKENS": 8, "COLS": 1024, "K": 8, "RANKS": 8, "MODE": mode, "PULL": mode == "sum", "IN_PLACE": False}
    shape |= {"ON_GPU": True, "EARLY": arch >= 90}
    if mode == "sum":
        return spec("send_home", names, {"y": "*bf16"}, {**shape, "WIDTH": 7168, "UNIT": 8, "OUT": "tl.bfloat16"}, 16, arch)
    absent: dict[str, Any] = {"shares": None} | ({"index": None} if mode == "rows" else {})
    return spec("send_home", names, {"y": "*i32"}, {**shape, "WIDTH": 3584, "UNIT": 4, "OUT": "tl.int32", **absent}, 16, arch)


def sum_(arch: int, *, ranks: int = 8, each: bool = False, pull: bool = False) -> Spec:
    names = (*_SEND[:3], "status", *_WHERE[:4], "ids", "weights", "n_valid", "out", "n_tokens", "tag", "limit", "home_at", "home_pitch")
    names += ("max_tokens", "slots_per_rank", "out_pitch")
    tile = {"TOKENS": 32, "COLS": 512} if ranks <= 2 else {"TOKENS": 8, "COLS": 1024}
    shape = {"HIDDEN": 7168, "UNIT": 8, **tile, "K": 8, "RANKS": ranks, "TOGETHER": 8}
    flags = {"HOME": "tl.bfloat16", "EACH": each, "PULL": pull, "TOLERANT": False, "CLOCK": True, "LANES": 512, "EARLY": arch >= 90}
    return spec("sum_home", names, {"out": "*bf16"}, {**shape, **flags}, 16, arch)


CASES = [
    ("send, quantised", lambda arch: send(arch)),
    ("send, many tokens quantised", lambda arch: send(arch, TOKENS=32, GROUPS=4)),
    ("send, scales of powers of two", lambda arch: send(arch, UE8M0=True)),
    ("send, as it is", lambda arch: send(arch, QUANTISE=False, WIDTH=3584, UNIT=4, GROUPS=1, COLS=1024)),
    ("send, many tokens as they are", lambda arch: send(arch, QUANTISE=False, WIDTH=3584, UNIT=4, TOKENS=32, GROUPS=1, COLS=256)),
    ("send, offsets below 2^31", lambda arch: send(arch, "i32", QUANTISE=False, WIDTH=3584, UNIT=4, GROUPS=1, COLS=1024)),
    ("send, among many", lambda arch: send(arch, RANKS=64, MANY=True)),
    ("receive", receive),
    ("home, rows", lambda arch: home(arch, "rows")),
    ("home, sums", lambda arch: home(arch, "sum")),
    ("home, each", lambda arch: home(arch, "each")),
    ("sum, ranks", lambda arch: sum_(arch)),
    ("sum, two ranks", lambda arch: sum_(arch, ranks=2)),
    ("sum, pulled", lambda arch: sum_(arch, pull=True)),
    ("sum, among many", lambda arch: sum_(arch, ranks=128)),
    ("sum, choices", lambda arch: sum_(arch, each=True)),
]
ARCHS = (80, 90, 100)
EVERYWHERE = ("send, as it is", "receive", "home, rows", "sum, ranks")


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, int], Report]:
    wanted = [(name, arch, make(arch)) for name, make in CASES for arch in ARCHS if arch == 90 or name in EVERYWHERE]
    found = compile_reports([entry for _, _, entry in wanted])
    return {(name, arch): report for (name, arch, _), report in zip(wanted, found, strict=True)}


def test_nothing_spills(reports):
    for name, report in reports.items():
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT, (name, report.registers, report.spill_bytes)


def test_rows_are_stored_16_bytes_at_a_time(reports):
    for name, report in reports.items():
        if name[0] != "receive":
            assert "st.global.v4.b32" in report.ptx, name
            assert re.search(r"st\.global\.b(8|16)\b", report.ptx) is None, name


def test_flags_are_released_and_acquired_by_the_system(reports):
    for (name, arch), report in reports.items():
        if name.startswith(("send", "home")):
            assert re.search(r"atom\.global\.sys\.acq_rel\.add\.u32", report.ptx), (name, arch)
            release = r"atom\.global\.sys\.release\.exch\.b64" if "among many" in name else r"st\.release\.sys\.global\.b128"
            assert re.search(release, report.ptx), (name, arch)
        else:
            assert re.search(r"atom\.global\.sys\.acquire\.add\.u64", report.ptx), (name, arch)
            assert "%globaltimer" in report.ptx, (name, arch)


def test_scales_are_stored_by_the_threads_that_have_them(reports):
    """A tensor that changes hands goes through shared memory; what is there is the last program's number and sums of counts."""
    assert reports["send, quantised", 90].shared <= 64 and reports["send, among many", 90].shared <= 64


def test_offsets_are_not_added_in_32_bits(reports):
    """Each may be below 2^31 and their sum above."""
    ttir = reports["send, offsets below 2^31", 90].ttir
    assert re.search(r"%rows_at\b", ttir) and re.search(r"arith\.addi %(channel_at|rows_at), %(channel_at|rows_at)", ttir) is None
