"""Settings of offloading that cannot work are refused with what was found and what to do; planned bytes are allocated bytes."""

from __future__ import annotations

import logging
import os

import pytest

from rorqual import LLM
from rorqual.attention.kv.host.pinned import PinnedBacking
from rorqual.attention.kv.hot import HotShape
from rorqual.engine.config import EngineConfig, check_config
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.offload.sizing import OffloadShape, host_pages_of, offload_sizes
from tests.checkpoints import checkpoint
from tests.offload.engines import PROMPTS, alone, make, params
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_offload": "on"}, "kv_offload must be one of off, host, hybrid, found 'on'"),
        ({"kv_hot_slots": 0}, "kv_hot_slots must be at least 1, found 0"),
        ({"kv_device_tokens": -1}, "kv_device_tokens must be at least 1, found -1"),
        ({"kv_host_memory": float("nan")}, "kv_host_memory must be above 0 GiB .* found nan"),
        ({"kv_host_memory": 0.0}, "kv_host_memory must be above 0 GiB"),
        ({"kv_host_backing": "file"}, "kv_host_backing file needs kv_host_path: the file of the pool"),
        ({"kv_host_backing": "cxl"}, "kv_host_backing cxl needs kv_host_path: NUMA nodes"),
        ({"kv_host_path": "/x"}, "of no use with kv_host_backing pinned"),
        ({"kv_offload": "host", "max_num_seqs": 1025}, "max_num_seqs 1025 is too many with kv_offload: .* use at most 1024"),
        ({"kv_host_memory": "64GiB"}, "kv_host_memory must be a number, found '64GiB'"),
        ({"kv_hot_slots_max": 0}, "kv_hot_slots_max must be at least 1, found 0"),
        ({"kv_hot_slots": 130.5}, "kv_hot_slots must be a whole number, found 130.5"),
        ({"kv_device_tokens": float("nan")}, "kv_device_tokens must be a whole number, found nan"),
        ({"page_size": True}, "page_size must be a whole number, found True"),
        ({"kv_offload": "off", "kv_hot_slots": 300}, "kv_hot_slots has no effect with kv_offload off"),
        ({"kv_offload": "off", "kv_hot_slots_max": 300}, "kv_hot_slots_max has no effect with kv_offload off"),
    ],
)
def test_settings_out_of_range(settings, said):
    with pytest.raises(ValueError, match=said):
        check_config(EngineConfig(model="m", **{"kv_offload": "host"} | settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_hot_slots": 8}, "kv_hot_slots 8 is less than the 24 keys of one token; use at least 24"),
        ({"kv_hot_slots_max": 47}, "kv_hot_slots_max 47 is less than the 48 hot rows that .* is promised .* use at least 48"),
        ({"kv_hot_slots_max": 32768}, "kv_hot_slots_max 32768 is more than the 32764 rows .* use at most 32764"),
        ({"kv_hot_slots": 32768}, "kv_hot_slots 32768 is more than the 32764 rows .* use at most 32764"),
        ({"kv_device_tokens": 63}, "use at least 64 tokens .kv_device_tokens"),
        ({"kv_host_memory": 0.0001}, "raise kv_host_memory"),
        ({"kv_host_memory": 0.02, "max_total_tokens": 1 << 20}, "pages of the host pool, which can have .* raise kv_host_memory"),
        ({"kv_device_tokens": 1 << 34}, "the KV cache does not fit"),
        ({"kv_host_backing": "file", "kv_host_path": "/nowhere/pool"}, "no such folder"),
    ],
    ids=str,
)
def test_what_the_model_or_the_machine_cannot_hold(settings, said):
    with pytest.raises(ValueError, match=said):
        make("host", **settings)


def test_one_job_at_a_time_on_a_pool_file(tmp_path):
    """Each engine numbers the file's pages by itself; one that has ended is no hindrance."""
    place = {"kv_host_backing": "file", "kv_host_path": str(tmp_path / "pool")}
    with make("host", **place) as llm:
        with pytest.raises(ValueError, match="in use by another job .* wait for its end or name another path"):
            make("host", **place)
        assert llm.generate([PROMPTS[7]], params(), use_tqdm=False)[0].outputs[0].token_ids == alone(7)
    with make("host", **place) as llm:
        assert llm.generate([PROMPTS[7]], params(), use_tqdm=False)[0].outputs[0].token_ids == alone(7)


def test_no_rank_takes_memory_before_all_have_found_room():
    said = run_ranks(short_of_memory_on_the_second, 2, timeout=120.0)
    assert "rank 1: no room" in said[0][0] and "no room" in said[1][0]
    for rank in range(2):
        assert said[rank][1:] == (0, rank, 1)


def short_of_memory_on_the_second():
    """(error, pools opened, node and ranks on it that the backing was told)."""
    rank, opened, places = int(os.environ["RANK"]), [], []

    def check(self, layout):
        places.append((*self.nodes, self.ranks_on_nodes))
        if rank == 1:
            raise ValueError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PinnedBacking, "check", check)
        patch.setattr(PinnedBacking, "open", lambda *_: opened.append(1))
        patch.setattr("rorqual.engine.offload.pools.gpu_node", lambda device: rank)
        with pytest.raises(ValueError) as error:
            make("host", tensor_parallel_size=2)
    return str(error.value), len(opened), *places[0]


@pytest.mark.parametrize("name", ["v3"])
def test_a_dense_model(name):
    with pytest.raises(ValueError, match="kv_offload needs a model that selects its keys .* use --kv-offload off"):
        LLM(str(checkpoint(name)), skip_tokenizer_init=True, kv_offload="hybrid", max_num_seqs=2)


def test_sizes_are_what_is_allocated_and_nothing_is_left():
    """Pools sized from memory fit it, and one page more of either kind would not."""
    model = parse_model_config(checkpoint("v32"))
    shape = OffloadShape(
        mla=model.attention, has_indexer=(True,) * 3, dtype="float32", page_size=16, policy="hybrid", max_num_seqs=8, max_model_len=1024,
        step_tokens=64,
    )  # fmt: skip
    for memory, host in ((8 << 20, 60), (8 << 20, 100000), (20 << 20, 100000), (1 << 30, 100000)):
        sizes = offload_sizes(shape, device_bytes=memory, host_pages=host)
        taken = shape.device_bytes(sizes.n_pages, sizes.n_device_pages).total
        useful = 8 * 64
        assert taken <= memory and sizes.n_pages <= min(host, useful)
        full = taken + shape.latent_page > memory
        assert full or sizes.n_device_pages == sizes.n_pages + 8 * shape.most_hot_pages
    layout = shape.host_layout(host_pages_of(shape, 50 << 20))
    assert layout.offsets[-1] <= 50 << 20 < shape.host_layout(layout.n_pages * 2).offsets[-1]
    assert isinstance(shape.tiers(10, 40).hot, HotShape)


def test_pools_sized_from_memory(caplog):
    caplog.set_level(logging.INFO, logger="rorqual")
    with make("hybrid", max_total_tokens=None, kv_device_tokens=None, max_model_len=128, disable_log_stats=False) as llm:
        tier = llm.engine.leader.scheduler.tier
        assert tier.limits.n_pages == 5 * 32  # all that five requests can use
        assert llm.generate([PROMPTS[3]], params(), use_tqdm=False)[0].outputs[0].token_ids == alone(3)
    said = caplog.text
    assert "KV offload hybrid" in said and "host pool" in said and "KV tiers" in said and "0 unwritten" in said
