"""What a prefix directory cannot work with is refused, with the reason and what to do."""

from __future__ import annotations

import pytest

from rorqual.engine.config import EngineConfig, check_config
from rorqual.engine.offload.host_share import HostShare, check_whole
from rorqual.parallel.grid import GridSpec
from tests.sharing.engines import shared


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_offload": "off"}, "it has no effect with kv_offload off; choose kv_offload host or hybrid"),
        ({"kv_host_backing": "pinned", "kv_host_path": None}, "a pool of kind pinned belongs to one rank; use kv_host_backing shm"),
        ({"kv_host_backing": "cxl", "kv_host_path": "stand-in"}, "a pool of kind cxl belongs to one rank"),
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching; leave --disable-radix-cache out"),
        ({"kv_host_memory": None}, "give kv_host_memory, the same GiB to each"),
        ({"ep_fault_tolerant": True}, "leave ep_fault_tolerant out"),
        ({"pipeline_parallel_size": 2}, "nobody knows that of the layers of 2 pipeline stages: use pipeline_parallel_size 1"),
    ],
)
def test_settings_that_cannot_work(settings, said):
    base = {"kv_offload": "host", "kv_host_backing": "file", "kv_host_path": "/x", "kv_host_memory": 1.0, "kv_prefix_directory": True}
    if settings.get("kv_offload") == "off":
        base = {"kv_prefix_directory": True}
    with pytest.raises(ValueError, match=said):
        check_config(EngineConfig(model="m", **base | settings))


def test_a_replica_on_several_hosts():
    config = EngineConfig(model="m", kv_prefix_directory=True)
    check_whole(config, HostShare.at(GridSpec(dp=2), 1, 1, 3))  # replicas on hosts of their own
    with pytest.raises(ValueError, match="kv_prefix_directory needs all ranks of a replica on one host"):
        check_whole(config, HostShare.at(GridSpec(tp=2), 1, 1, 3))


def test_a_pool_without_a_directory_is_another(tmp_path):
    """Two engines on one file must both have the directory."""
    plain = {"kv_prefix_directory": False, "max_total_tokens": 240}
    with shared(tmp_path), pytest.raises(ValueError, match="another layout .n_pages is"):
        shared(tmp_path, **plain)
