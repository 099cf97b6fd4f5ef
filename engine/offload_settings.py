"""Which settings of offloading go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..attention.kernels.tier_most import MOST_REQUESTS

if TYPE_CHECKING:
    from .config import EngineConfig


def check_offload_settings(config: EngineConfig) -> None:
    """Refuse what cannot work with the host pool, on any machine.

    Raises:
        ValueError: naming the setting, the value and what is allowed.
    """
    if config.kv_offload == "off":
        idle = [
            name
            for name in ("kv_host_memory", "kv_host_path", "kv_hot_slots", "kv_hot_slots_max", "kv_device_tokens")
            if getattr(config, name) is not None
        ]
        if idle:
            raise ValueError(f"{idle[0]} has no effect with kv_offload off; choose kv_offload host or hybrid, or leave it out")
    for name in ("kv_hot_slots", "kv_hot_slots_max", "kv_device_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")
    if config.kv_offload != "off" and config.max_num_seqs > MOST_REQUESTS:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} is too many with kv_offload: rows are fetched for at most {MOST_REQUESTS} requests in a "
            f"step; use at most {MOST_REQUESTS}, and more replicas (data_parallel_size) for more requests"
        )
    if config.kv_prefix_directory:
        _check_directory(config)
    memory, backing, path = config.kv_host_memory, config.kv_host_backing, config.kv_host_path
    if memory is not None and not 0.0 < memory <= 1e6:  # written so that NaN is refused too
        raise ValueError(f"kv_host_memory must be above 0 GiB and at most 1000000, found {memory}")
    if backing in ("file", "cxl") and not path:
        what = "the file of the pool" if backing == "file" else "NUMA nodes (node2,node3), DAX devices (/dev/dax0.0) or stand-in"
        raise ValueError(f"kv_host_backing {backing} needs kv_host_path: {what}")
    if backing == "pinned" and path:
        raise ValueError(f"kv_host_path {path!r} is of no use with kv_host_backing pinned; leave it out, or use shm, file or cxl")


def _check_directory(config: EngineConfig) -> None:
    what = "kv_prefix_directory shares the pages of a host pool"
    if config.kv_offload == "off":
        raise ValueError(f"{what}: it has no effect with kv_offload off; choose kv_offload host or hybrid, or leave it out")
    if config.kv_host_backing not in ("shm", "file"):
        raise ValueError(
            f"{what}, and a pool of kind {config.kv_host_backing} belongs to one rank; use kv_host_backing shm (the replicas of one "
            "engine) or file (engines that are started separately too)"
        )
    if config.kv_host_backing == "file" and config.kv_host_memory is None:
        raise ValueError(f"{what}, which all engines of a file must make equally large; give kv_host_memory, the same GiB to each")
    if config.ep_fault_tolerant:
        raise ValueError(f"{what}: rows computed without the experts of a lost rank would be offered to all; leave ep_fault_tolerant out")
    if not config.enable_prefix_caching:
        raise ValueError(f"{what} with equal prefixes: it needs enable_prefix_caching; leave --disable-radix-cache out")
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            f"{what}, which must be finished; nobody knows that of the layers of {config.pipeline_parallel_size} pipeline stages: "
            "use pipeline_parallel_size 1"
        )
