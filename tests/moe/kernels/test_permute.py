"""Permutation of choices, in the interpreter, against plain PyTorch and its own definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm.fp8 import dequantise, quantise
from rorqual.comm.order import ordered_sum, sort_choices
from rorqual.moe.kernels import permute as kernels
from rorqual.moe.kernels import permute_rows as moves
from rorqual.moe.kernels import permute_torch as plain
from tests.kernels.offline import SMEM_LIMIT, Report, Spec, compile_reports

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
#: form of ``permute_rows_kernel`` -> types of what it reads and writes
FORMS = {
    "quantise": {},
    "plain": {"rows": "*bf16"},
    "scaled": {"x": "*u8", "rows": "*u8"},
    "widen": {"x": "*fp8e4nv", "rows": "*bf16"},
}
SHAPES = [(1, 8, 16, 16), (7, 3, 5, 16), (0, 2, 4, 16), (33, 8, 12, 32), (9, 1, 1, 128), (600, 8, 9, 64)]


def random_slots(tokens: int, k: int, n_slots: int) -> torch.Tensor:
    slots = torch.randint(-1, n_slots, (tokens, k), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    if tokens > 2:
        slots[1] = -1
        slots[2] = n_slots + 5  # nobody's either
    return slots


def equal(a: plain.RowBlocks, b: plain.RowBlocks) -> None:
    for name, value in vars(b).items():
        other = getattr(a, name)
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_layout_equals_plain_version(shape: tuple[int, int, int, int]) -> None:
    tokens, k, n_slots, block = shape
    slots = random_slots(tokens, k, n_slots)
    equal(kernels.permute(slots, n_slots, block=block), plain.permute(slots, n_slots, block=block))


def test_rows_are_sorted_and_padded() -> None:
    slots = random_slots(40, 4, 6)
    layout = plain.permute(slots, 6, block=16)
    index = layout.sorted_index.long()
    flat = slots.reshape(-1).long()
    for block in range(int(layout.n_blocks)):
        rows = index[block * 16 : block * 16 + 16]
        n = int(layout.block_rows[block])
        assert bool((rows[:n] >= 0).all()) and bool((rows[n:] == -1).all())
        assert bool((flat[rows[:n]] == layout.block_slot[block]).all())
        assert rows[:n].tolist() == sorted(rows[:n].tolist())
    kept = (flat >= 0) & (flat < 6)
    assert torch.equal(layout.place.reshape(-1)[kept].sort().values, torch.arange(len(index))[index >= 0].int())
    assert int(layout.counts.sum()) == flat.numel()
    assert bool((index[int(layout.offsets[-1]) :] == -1).all())


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("stride", [None, 100])
@interpreted
def test_blocks_of_sorted_rows(block: int, stride: int | None) -> None:
    counts = torch.tensor([0, 17, 64, 1, 0, 100])
    equal(kernels.segment_blocks(counts, 300, block, stride=stride), plain.segment_blocks(counts, 300, block, stride=stride))


@pytest.mark.parametrize("n", [0, 1, 5, 64, 1000])
def test_bound_of_blocks_is_reached_and_never_passed(n: int) -> None:
    for n_slots in (1, 4, 40):
        bound = plain.max_row_blocks(n, n_slots, 16)
        worst = torch.zeros(n_slots, dtype=torch.int64)
        worst[: min(n, n_slots)] = 1
        worst[0] += n - int(worst.sum())
        assert int((-(-worst // 16)).sum()) <= bound
        assert bound == 1 or int((-(-worst // 16)).sum()) >= bound - 1


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_there_and_back(dtype: torch.dtype) -> None:
    slots = random_slots(21, 3, 5)
    x = torch.randn(21, 200).to(dtype)
    weights = torch.rand(21, 3)
    layout = kernels.permute(slots, 5, block=16)
    rows, none = moves.permute_rows(x, layout)
    assert none is None
    real = layout.sorted_index >= 0
    assert torch.equal(rows[real], plain.permute_rows(x, layout)[0][real])
    rows[~real] = float("nan")
    out = moves.unpermute(rows, layout.place, weights, out_dtype=torch.float32)
    rows[~real] = 0
    torch.testing.assert_close(out, plain.unpermute(rows, layout.place, weights, out_dtype=torch.float32), rtol=1e-6, atol=1e-6)
    assert bool((out[1] == 0).all()) and bool((out[2] == 0).all())


@interpreted
def test_fp8_rows_have_the_scales_of_the_tokens() -> None:
    """Values are compared on the GPU: the interpreter's e4m3 rounding loses the carry into the exponent."""
    slots, x = random_slots(9, 2, 4), torch.randn(9, 300)
    layout = kernels.permute(slots, 4, block=16)
    (values, scales), (_, expected) = moves.permute_rows(x, layout, quantise=True), plain.permute_rows(x, layout, quantise=True)
    real = layout.sorted_index >= 0
    assert values.dtype == torch.float8_e4m3fn
    assert scales is not None and expected is not None and torch.equal(scales[real], expected[real])


def travelled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as block FP8 in rows of a wire: values, then scales, then a gap."""
    values, scales = quantise(x)
    width, steps = x.shape[1], scales.shape[1]
    wire = torch.full((len(x), width + 4 * steps + 16), 0x7F, dtype=torch.uint8)
    wire[:, :width] = values.view(torch.uint8)
    wire[:, width : width + 4 * steps].view(torch.float32).copy_(scales)
    return wire[:, :width].view(torch.float8_e4m3fn), wire[:, width : width + 4 * steps].view(torch.float32)


@interpreted
@pytest.mark.parametrize("module", [moves, plain], ids=["kernel", "plain"])
def test_rows_that_arrive_as_fp8_keep_their_bits(module: Any) -> None:
    slots, (values, steps) = random_slots(9, 2, 4), travelled(torch.randn(9, 300))
    layout = kernels.permute(slots, 4, block=16)
    real = layout.sorted_index >= 0
    token = layout.sorted_index[real].long() // 2
    rows, scales = module.permute_rows(values, layout, quantise=True, x_scales=steps)
    assert rows.dtype == torch.float8_e4m3fn and scales is not None and scales.stride(0) == 1
    assert torch.equal(rows[real].view(torch.uint8), values[token].view(torch.uint8)) and torch.equal(scales[real], steps[token])
    wide, none = module.permute_rows(values, layout, x_scales=steps, dtype=torch.float32)
    assert none is None and torch.equal(wide[real], dequantise(values, steps, torch.float32)[token])


@interpreted
def test_tokens_without_a_choice_are_not_read() -> None:
    """They may be anything, as rows of a wire that nobody sent are."""
    slots = torch.tensor([[0, 2], [-1, -1], [-1, 1]], dtype=torch.int32)
    x = torch.randn(3, 128)
    layout = plain.permute(slots, 3, block=16)
    rows = moves.permute_rows(x, layout)[0]
    assert torch.equal(rows[layout.place[0].long()], x[:1].expand(2, 128)) and torch.equal(rows[int(layout.place[2, 1])], x[2])


def test_scales_come_with_e4m3_only() -> None:
    layout = plain.permute(random_slots(4, 2, 4), 4, block=16)
    values, steps = travelled(torch.randn(4, 300))
    for x, scales, found in ((values, None, "no scales"), (values.float(), steps, "torch.float32"), (values, steps[:, :2], r"\(4, 2\)")):
        with pytest.raises(ValueError, match=found):
            plain.permute_rows(x, layout, x_scales=scales)


def test_sum_has_the_order_of_the_dispatchers() -> None:
    """Ascending slots, whatever the columns say: bit for bit what ``comm.order`` gives."""
    slots, weights, y = random_slots(30, 4, 7), torch.rand(30, 4), torch.randn(1000, 48)
    layout = plain.permute(slots, 7, block=16)
    ids, ordered = sort_choices(torch.where(slots < 7, slots, -1), weights)
    column = torch.where((slots < 0) | (slots >= 7), 99, slots).sort(dim=1, stable=True).indices
    index = torch.where(ids >= 0, layout.place.gather(1, column).long(), -1)
    expected = ordered_sum(y, index, ordered)
    torch.testing.assert_close(plain.unpermute(y, layout.place, weights, out_dtype=torch.float32), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("slots", "block", "said"),
    [(torch.zeros(2, 2), 16, "int32"), (torch.zeros(4, dtype=torch.int32), 16, "int32"), (torch.zeros(2, 2, dtype=torch.int32), 48, "48")],
)
def test_refusals_name_what_was_found(slots: torch.Tensor, block: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernels.permute(slots, 4, block=block)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    pointers = ("slots", "counts", "offsets", "sorted_index", "place", "block_slot", "block_row", "block_rows", "n_blocks")
    place = {**dict.fromkeys(pointers, "*i32"), "n": "i32", "n_slots": "i32", "bound": "i32"}
    rows = {"x": "*bf16", "steps": "*fp32", "place": "*i32", "rows": "*fp8e4nv", "scales": "*fp32"}
    rows |= dict.fromkeys(("width", "x_stride", "step_stride", "scale_pitch"), "i32")
    back = {"y": "*bf16", "place": "*i32", "weights": "*fp32", "out": "*bf16", "width": "i32", "y_stride": "i32", "weight_stride": "i32"}
    module = "rorqual.moe.kernels.permute:"
    return compile_reports(
        [
            Spec(
                fn=module + "permute_place_kernel", signature=place, options={"num_warps": 8},
                constexprs={"COUNT": count, "SLOTS": 512, "TILE": 4096, "BLOCK": 64, "EARLY": True},
            )
            for count in ("bins",)
        ]
        + [
            Spec(
                fn="rorqual.moe.kernels.permute_rows:permute_rows_kernel", signature=rows | kinds,
                aligned=("x", "rows", "width", "x_stride"),
                constexprs={"K": 8, "CHOICES": 8, "FORM": form, "GROUPS": 8, "BLOCK": 128, "EARLY": True},
            )
            for form, kinds in FORMS.items()
        ]
        + [
            Spec(
                fn="rorqual.moe.kernels.permute_rows:unpermute_kernel", signature=back,
                constexprs={"K": 8, "CHOICES": 8, "BLOCK": 1024, "EARLY": True},
            ),
        ]
    )  # fmt: skip


def test_compiles_for_hopper_without_spills(reports: list[Report]) -> None:
    for report in reports:
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
