"""Row formats: sizes, bytes, error bounds, poison."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.attention.config import IndexerConfig, MLAConfig, RopeConfig
from rorqual.attention.kv.cache import KVCache, kv_bytes_per_token
from rorqual.attention.kv.hot import HotShape
from rorqual.attention.kv.layout import decode_latent, encode_latent, fp8_latent_bytes, quantise
from rorqual.attention.kv.sizes import TierShape, kv_bytes
from tests.attention.common import DENSE, SPARSE

V32 = MLAConfig(
    hidden=64,
    n_heads=2,
    q_lora_rank=16,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    rope=RopeConfig(dim=64),
    indexer=IndexerConfig(n_heads=64, head_dim=128, topk=2048),
)


def test_bytes_per_token_of_deepseek_v32():
    assert kv_bytes_per_token(V32, [True], "fp8") == 656 + 132
    assert kv_bytes_per_token(V32, [True, False], "bfloat16") == 2 * 1152 + 256
    assert kv_bytes_per_token(V32, [False] * 3, "float32") == 3 * 2304
    assert kv_bytes_per_token(V32, [], "fp8") == 0
    assert kv_bytes_per_token(V32, [True], "fp8", "fp4") == 656 + 68
    assert kv_bytes_per_token(V32, [True, False], "bfloat16", "fp4") == 2 * 1152 + 68
    assert kv_bytes_per_token(V32, [True], "fp8", "float32") == 656 + 512


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_memory_is_what_the_sizes_say(dtype):
    cache = KVCache(SPARSE, [True, False], 5, 8, dtype, torch.float32, "cpu")
    assert cache.bytes_per_token == kv_bytes_per_token(SPARSE, [True, False], dtype)
    assert cache.n_bytes == cache.bytes_per_token * 6 * 8 and cache.dummy_page == 5
    assert cache.layers[0].index is not None and cache.layers[1].index is None


def bound(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Half a step of e4m3: three mantissa bits, or the subnormal step 2**-9."""
    return torch.maximum(values.abs() * 2**-4, scales * 2**-10) * 1.0001


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.sampled_from([1e-9, 1e-3, 1.0, 1e4]), st.integers(0, 99))
def test_quantised_values_stay_within_half_a_step(width, size, seed):
    values = torch.randn(4, width, generator=torch.Generator().manual_seed(seed)) * size
    values[0] = 0
    codes, scales = quantise(values, 128)
    assert codes.shape == (4, width) and scales.shape == (4, -(-width // 128))
    wide = scales.repeat_interleave(128, 1)[:, :width]
    back = codes.view(torch.float8_e4m3fn).float() * wide
    assert ((back - values).abs() <= bound(values, wide)).all() and not back[0].any()
    for group in range(scales.shape[1]):
        amax = values[1:, group * 128 : group * 128 + 128].abs().amax(1)
        torch.testing.assert_close(scales[1:, group], amax / 448)


@pytest.mark.parametrize("latent,rope", [(512, 64), (32, 8), (200, 2), (128, 32)])
def test_latent_rows_are_values_scales_rope(latent, rope):
    values = torch.randn(7, latent + rope) * torch.logspace(-3, 3, 7)[:, None]
    rows = encode_latent(values, latent)
    assert rows.dtype == torch.uint8 and rows.shape == (7, fp8_latent_bytes(latent, rope))
    groups = -(-latent // 128)
    scales = rows[:, latent : latent + 4 * groups].contiguous().view(torch.float32)
    back = decode_latent(rows, latent)
    assert ((back - values)[:, :latent].abs() <= bound(values[:, :latent], scales.repeat_interleave(128, 1)[:, :latent])).all()
    assert torch.equal(back[:, latent:], values[:, latent:].bfloat16().float())
    rows[:, latent : latent + 4 * groups] = torch.full((7, groups), 0.3).view(torch.uint8)  # scales need be no powers of two
    torch.testing.assert_close(decode_latent(rows, latent)[:, :latent], rows[:, :latent].view(torch.float8_e4m3fn).float() * 0.3)


def test_fp8_latent_of_deepseek_is_656_bytes():
    assert encode_latent(torch.randn(2, 576), 512).shape == (2, 656)


def test_fp8_index_pages_hold_all_values_then_all_scales():
    cache = KVCache(SPARSE, [True], 3, 4, "fp8", torch.float32, "cpu")
    index, keys = cache.layers[0].index, torch.randn(4, 16)
    index.write(torch.tensor([4, 5, 6, 7]), keys)
    page = index.pages[1]
    scales = page[64:].view(torch.float32)
    torch.testing.assert_close(scales, keys.abs().amax(1) / 448)
    expected = page[:64].view(torch.float8_e4m3fn).float().view(4, 16) * scales[:, None]
    assert torch.equal(index.read(torch.tensor([[4, 5], [6, 7]])).view(4, 16), expected)
    assert ((expected - keys).abs() <= bound(keys, scales[:, None])).all()
    assert not index.pages[0].any() and not index.pages[2:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_rows_come_back_from_where_they_were_written(dtype, compute):
    cache = KVCache(SPARSE, [True], 6, 4, dtype, compute, "cpu")
    rows = torch.tensor([23, 0, 9, 17])
    latent, keys = torch.randn(4, 40), torch.randn(4, 16)
    layer = cache.layers[0]
    layer.latent.write(rows, latent)
    layer.index.write(rows, keys)
    order = torch.tensor([[2, 0], [3, 1]])
    got, index = layer.latent.read(rows[order]), layer.index.read(rows[order])
    assert got.dtype == compute and got.shape == (2, 2, 40) and index.dtype == torch.float32 and index.shape == (2, 2, 16)
    tolerance = {"float32": 0.0 if compute == torch.float32 else 0.02, "bfloat16": 0.02, "fp8": 0.25}[dtype]
    assert (got.float() - latent[order]).abs().max() <= tolerance
    assert (index - keys[order]).abs().max() <= {"float32": 0.0, "bfloat16": 0.02, "fp8": 0.25}[dtype]
    assert layer.latent.read(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 40)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_poison_makes_every_value_of_the_pages_nan_and_no_other(dtype):
    cache = KVCache(SPARSE, [True, True], 3, 2, dtype, torch.float32, "cpu")
    cache.poison([1, 3])
    for layer in cache.layers:
        for store in (layer.latent, layer.index):
            values = store.read(torch.arange(8))
            assert values[[2, 3, 6, 7]].isnan().all() and not values[[0, 1, 4, 5]].isnan().any()
    cache.poison([])
    cache.poison(np.array([0], np.int32))
    assert cache.layers[0].latent.read(torch.tensor([0])).isnan().all()


WIDE = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, head_dim=32))
FORMATS = {"float32": 128, "bfloat16": 64, "fp8": 36, "fp4": 20}  # bytes of an index key of 32 values


@pytest.mark.parametrize("index", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_index_keys_of_any_format_go_with_rows_of_any(dtype, index):
    cache = KVCache(WIDE, [True, False], 5, 4, dtype, torch.float32, "cpu", index_dtype=index)
    planned = kv_bytes(WIDE, [True, False], dtype, n_pages=5, page_size=4, index_dtype=index)
    assert planned.total == cache.n_bytes and planned.index == cache.layers[0].index.n_bytes == 6 * 4 * FORMATS[index]
    assert cache.bytes_per_token == kv_bytes_per_token(WIDE, [True, False], dtype, index) and cache.bytes_per_token * 24 == cache.n_bytes
    assert cache.index_dtype == index and cache.layers[0].rotate_index == (index in ("fp8", "fp4"))
    cache.poison([1])
    cache.layers[0].index.write(torch.tensor([8]), torch.ones(1, 32))
    values = cache.layers[0].index.read(torch.arange(24))
    assert values[4:8].isnan().all() and not values[:4].isnan().any()
    torch.testing.assert_close(values[8], torch.ones(32), rtol=0.1, atol=0)


def test_index_keys_have_the_format_of_the_rows_by_default():
    for dtype in ("float32", "bfloat16", "fp8"):
        plain, named = (KVCache(WIDE, [True], 3, 4, dtype, torch.float32, "cpu", index_dtype=index) for index in (None, dtype))
        assert plain.n_bytes == named.n_bytes and plain.index_dtype == dtype and type(plain.layers[0].index) is type(named.layers[0].index)
        assert plain.layers[0].rotate_index == named.layers[0].rotate_index == (dtype == "fp8")


@pytest.mark.parametrize(
    ("config", "index", "message"),
    [
        (WIDE, "int4", "unknown index cache dtype 'int4'; use one of float32, bfloat16, fp8, fp4"),
        (SPARSE, "fp4", "power of two, 32 or more, got 16; use float32, bfloat16 or fp8 .index_cache_dtype"),
        (dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, head_dim=96)), "fp4", "got 96; use float32 or bfloat16"),
        (dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, head_dim=24)), "fp8", "got 24; use float32 or bfloat16"),
    ],
)
def test_index_formats_that_cannot_be_are_refused(config, index, message):
    with pytest.raises(ValueError, match=message):
        KVCache(config, [True], 2, 4, "float32", torch.float32, "cpu", index_dtype=index)
    with pytest.raises(ValueError, match=message):
        kv_bytes(config, [True], "float32", n_pages=2, page_size=4, index_dtype=index)


ODD = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, head_dim=24))


@pytest.mark.parametrize(
    "config,has,pages,size,dtype,message",
    [
        (SPARSE, [True], 1, 1, "int4", "unknown KV cache dtype 'int4'; use one of float32, bfloat16, fp8"),
        (dataclasses.replace(DENSE, kv_lora_rank=30), [False], 1, 1, "fp8", "kv_lora_rank divisible by 4 .* got 30 and 8"),
        (ODD, [True], 1, 1, "fp8", "index_head_dim that is a power of two, 4 or more, got 24"),
        (SPARSE, [True], 0, 4, "float32", "at least one page, got 0"),
        (SPARSE, [True], 1, 12, "float32", "page size must be a power of two, got 12"),
        (DENSE, [True], 1, 4, "float32", "attention configuration has none"),
    ],
)
def test_what_cannot_be_is_refused(config, has, pages, size, dtype, message):
    with pytest.raises(ValueError, match=message):
        KVCache(config, has, pages, size, dtype, torch.float32, "cpu")


class Host:
    """Host rows of a layer, without memory."""

    def __init__(self, row_bytes: int, pitch: int) -> None:
        self.row_bytes, self.pitch, self.n_rows, self.bytes = row_bytes, pitch, 0, torch.empty(0, pitch, dtype=torch.uint8)

    def data_ptr(self) -> int:
        return 0


def tiers(n_device_pages: int = 6, **changes: int) -> TierShape:
    sizes = {"n_slots": 3, "n_layers": 2, "lease_pages": 2, "page_size": 4, "n_logical_pages": 10}
    sizes |= {"max_requests": 5, "max_context": 30, "chosen_rows": 8} | changes
    return TierShape(n_device_pages=n_device_pages, hot=HotShape(**sizes))


def tiered(dtype: str = "float32", shape: TierShape | None = None, row: int = 160, n_host: int = 2) -> KVCache:
    host = [Host(row, row + 8)] * n_host
    return KVCache(SPARSE, [True, False], 10, 4, dtype, torch.float32, "cpu", tiers=shape or tiers(), host=host)


@pytest.mark.parametrize(("dtype", "row"), [("float32", 160), ("bfloat16", 80), ("fp8", 32 + 4 + 16)])
def test_planned_bytes_are_allocated_bytes(dtype, row):
    for shape in (None, tiers(), tiers(n_device_pages=1, n_slots=1, lease_pages=7, max_context=29)):
        planned = kv_bytes(SPARSE, [True, False], dtype, n_pages=10, page_size=4, tiers=shape)
        cache = KVCache(
            SPARSE, [True, False], 10, 4, dtype, torch.float32, "cpu", tiers=shape, host=[] if shape is None else [Host(row, row)] * 2
        )
        assert planned.total == cache.n_bytes
        assert planned.latent == sum(layer.latent.n_bytes for layer in cache.layers) == 2 * (cache.n_device_pages + 1) * 4 * row
        assert planned.index == cache.layers[0].index.n_bytes
        assert shape is not None or planned.hot == planned.tables == 0


def test_index_keys_are_logical_and_latent_rows_are_on_the_device():
    cache = tiered()
    assert (cache.dummy_page, cache.dummy_device_page) == (10, 6)
    assert cache.layers[0].index.read(torch.arange(44)).shape == (44, 16) and len(cache.layers[0].latent.bytes) == 28
    assert cache.tables.device_page.tolist() == [-1] * 10 + [6] and cache.tables.host_page.tolist() == [-1] * 11
    cache.poison([2], [5])
    for layer in cache.layers:
        assert layer.latent.read(torch.arange(28)).isnan().any(1).nonzero()[:, 0].tolist() == [20, 21, 22, 23]
    assert cache.layers[0].index.read(torch.arange(44)).isnan().any(1).nonzero()[:, 0].tolist() == [8, 9, 10, 11]
    cache.poison([1])
    assert not cache.layers[1].latent.read(torch.arange(20)).isnan().any()
    first, second = (layer.tier for layer in cache.layers)
    first.hot.positions[1, 3] = 7
    second.counters[2] = 5
    assert cache.hot.positions[0, 1, 3] == 7 and cache.hot.positions[1].eq(-1).all() and cache.hot.counters.tolist()[1][2] == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_rows_move_as_bytes(dtype):
    cache = KVCache(SPARSE, [False], 2, 4, dtype, torch.float32, "cpu")
    latent = cache.layers[0].latent
    latent.write(torch.arange(12), torch.randn(12, 40))
    order = torch.randperm(12)
    assert torch.equal(latent.decode(latent.bytes[order]), latent.read(order))
    latent.bytes[3] = latent.bytes[7]
    assert torch.equal(latent.read(torch.tensor(3)), latent.read(torch.tensor(7)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiered(shape=tiers(n_device_pages=0)), "at least one latent page on the device, got 0"),
        (lambda: tiered(shape=tiers(page_size=8)), "'page_size': 8}, the cache has .*'page_size': 4"),
        (lambda: tiered(shape=tiers(n_layers=3)), "'n_layers': 3"),
        (lambda: tiered(n_host=1), "2 layers needs host rows for each of them, got 1"),
        (lambda: tiered(row=80), "latent rows of 160 bytes, got rows of 80 bytes in a pitch of 88"),
    ],
)
def test_tiers_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
