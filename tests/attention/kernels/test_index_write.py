"""The fused index-key write against its twin, and the twin against the indexer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from rorqual.attention.hadamard import hadamard
from rorqual.attention.kernels import index_write, index_write_torch
from rorqual.attention.kv import fp4
from rorqual.attention.kv.rows import FloatRows, Fp4IndexRows, Fp8IndexRows
from rorqual.attention.rope import rotate
from tests.attention.kernels.fused import codes_agree, gains, noise, places, turns
from tests.kernels import casts
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

casts.repair()
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
N_PAGES = 5


def empty_pool(kind: str, width: int, page_size: int) -> torch.Tensor:
    """A pool full of NaN."""
    if kind in ("fp8", "fp4"):
        return torch.full((N_PAGES, page_size * (width + 4 if kind == "fp8" else fp4.key_bytes(width))), 0xFF, dtype=torch.uint8)
    return torch.full((N_PAGES * page_size, width), float("nan"), dtype=getattr(torch, kind))


def pools_agree(got: torch.Tensor, expected: torch.Tensor, width: int, page_size: int) -> None:
    """Equal but for the rounding of sums."""
    if got.dtype != torch.uint8:
        torch.testing.assert_close(got, expected, rtol=2**-7 if got.dtype == torch.bfloat16 else 1e-4, atol=2e-5, equal_nan=True)
        return
    codes_agree(got[:, : page_size * width], expected[:, : page_size * width], share=0.01)
    scales = [pool[:, page_size * width :].view(torch.float32) for pool in (got, expected)]
    torch.testing.assert_close(*scales, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "bfloat16"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_twin_is_what_the_indexer_does(kind, interleaved):
    width, rope, tokens, page_size = 32, 16, 9, 4
    k, turn, rows = noise(tokens, width, dtype=torch.bfloat16), turns(tokens, rope), places(tokens, N_PAGES * page_size)
    weight, bias = gains(width), gains(width, seed=3) - 1
    if kind != "bfloat16":
        store = {"fp8": Fp8IndexRows, "fp4": Fp4IndexRows}[kind](N_PAGES, page_size, width, torch.float32, k.device)
        store.pages.copy_(empty_pool(kind, width, page_size))
    else:
        store = FloatRows(N_PAGES, page_size, width, torch.bfloat16, torch.float32, k.device)
        store.rows.copy_(empty_pool(kind, width, page_size))
    values = functional.layer_norm(k.float(), (width,), weight, bias, 1e-6)
    head = rotate(values[:, :rope], torch.view_as_complex(turn), interleaved=interleaved)
    values = torch.cat((head, values[:, rope:]), -1)
    coded = kind != "bfloat16"
    store.write(rows, hadamard(values) if coded else values)
    pool = empty_pool(kind, width, page_size)
    options = {"page_size": page_size, "interleaved": interleaved, "rotate": coded}
    index_write_torch.write_index(k, weight, bias, 1e-6, turn, rows, pool, **options)
    expected = store.pages if coded else store.rows
    assert torch.equal(pool, expected) if coded else torch.equal(pool.isnan(), expected.isnan())
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


@on_cpu
@pytest.mark.parametrize(
    ("width", "rope", "page_size", "kind", "rotated", "given"),
    [
        (128, 64, 64, "fp8", True, torch.bfloat16),
        (64, 32, 16, "fp8", True, torch.float32),
        (16, 8, 1, "fp8", True, torch.bfloat16),
        (4, 2, 4, "fp8", True, torch.float32),
        (128, 64, 4, "fp8", False, torch.float32),
        (256, 64, 4, "float32", True, torch.float32),
        (48, 16, 4, "float32", False, torch.float32),
        (128, 64, 4, "bfloat16", False, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_kernel_is_the_twin(width, rope, page_size, kind, rotated, given, interleaved):
    n_rows = N_PAGES * page_size
    tokens = min(5, n_rows)
    k, turn, rows = noise(tokens, width, dtype=given, gap=8), turns(tokens, rope), places(tokens, n_rows, skip=3)
    weight, bias = gains(width), gains(width, seed=3) - 1
    options = {"page_size": page_size, "interleaved": interleaved, "rotate": rotated}
    got, expected = empty_pool(kind, width, page_size), empty_pool(kind, width, page_size)
    index_write.write_index(k, weight, bias, 1e-6, turn, rows, got, **options)
    index_write_torch.write_index(k, weight, bias, 1e-6, turn, rows, expected, **options)
    pools_agree(got, expected, width, page_size)


@on_cpu
@pytest.mark.parametrize(("width", "rope", "page_size", "tokens"), [(128, 64, 64, 9), (64, 32, 16, 9), (32, 8, 1, 5), (256, 64, 4, 6)])
@pytest.mark.parametrize("together", [1, 4])
def test_the_kernel_is_the_twin_in_fp4(width, rope, page_size, tokens, together):
    k, turn, rows = noise(tokens, width, gap=8), turns(tokens, rope), places(tokens, N_PAGES * page_size, skip=3)
    k[1, 3], k[2] = float("nan"), 0.5  # a key that is not finite, and one without spread
    weight, bias = gains(width), gains(width, seed=3) - 1
    got, expected = empty_pool("fp4", width, page_size), empty_pool("fp4", width, page_size)
    index_write.launch(k, weight, bias, 1e-6, turn, rows, got, page_size, True, True, {"TOKENS": together, "num_warps": 1})
    index_write_torch.write_index(k, weight, bias, 1e-6, turn, rows, expected, page_size=page_size, interleaved=True, rotate=True)
    half = page_size * width // 2
    words = [pool[:, half:].view(torch.int32).flatten() for pool in (got, expected)]
    assert int((words[1] != -1).sum()) == int((rows >= 0).sum()) - int(rows[1] >= 0)
    equal = words[0] == words[1]
    assert int((~equal).sum()) <= 1, "a block may find another multiplier as good where sums are rounded in another order"
    codes = [pool[:, :half].reshape(-1, width // 2)[equal & (words[1] != -1)] for pool in (got, expected)]
    assert float((codes[0] != codes[1]).float().mean()) < 0.01


@on_cpu
def test_no_tokens_and_a_width_that_does_not_fit():
    options = {"page_size": 4, "interleaved": True, "rotate": True}
    pool = empty_pool("fp8", 16, 4)
    none = torch.empty(0, dtype=torch.int64)
    index_write.write_index(noise(0, 16), gains(16), gains(16), 1e-6, turns(0, 8), none, pool, **options)
    assert bool((pool == 0xFF).all())
    with pytest.raises(ValueError, match="power of two, got 24"):
        index_write.write_index(noise(0, 24), gains(24), gains(24), 1e-6, turns(0, 8), none, pool, **options)


def test_compiles_for_hopper():
    pointers = {"k": "*bf16", "weight": "*fp32", "bias": "*fp32", "turn": "*fp32", "rows": "*i64", "pool": "*u8"}
    shape = {"D": 128, "R": 64, "BLOCK": 128, "LOW": 4, "HIGH": 3, "PAGE": 64, "TRANSFORM": True, "NORM": 128**-0.5}
    specs = [
        Spec(
            fn="rorqual.attention.kernels.index_write:write_index_kernel",
            signature={**pointers, "n_tokens": "i32", "stride": "i32", "eps": "fp32"},
            constexprs={**shape, "TOKENS": tokens, "INTERLEAVED": tokens == 1, "FP8": not fp4_keys, "FP4": fp4_keys, "EARLY": True},
            aligned=(*pointers, "stride"),
            options={"num_warps": 1 if fp4_keys else tokens},
        )
        for tokens in (1, 4)
        for fp4_keys in (False, True)
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
