"""How many KV pages a rank can hold."""

from __future__ import annotations

import os

import torch

from ..attention.kv.host.room import available_bytes
from .config import EngineConfig
from .tables import request_table_bytes

#: share of free host memory that KV pools of CPU ranks may take
CPU_SHARE = 0.25


def free_bytes(device: torch.device, config: EngineConfig, local_ranks: int) -> int:
    """Bytes this rank may spend on its KV pool, after the weights are in place."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1.0 - config.gpu_memory_utilization) * total))
    free = min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), host_available())
    return int(free * CPU_SHARE) // local_ranks


def host_available() -> int:
    """Bytes of host memory that can be had without swapping, cached files counted, or the rest of the control group's limit."""
    try:
        return available_bytes()
    except (OSError, ValueError):  # no /proc, or another system's
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def room_of(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Bytes that this rank can get at all, and where, for messages."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch gives it back when memory is short
        return torch.cuda.mem_get_info(device)[0] + kept, f"on {device}"
    return host_available() // local_ranks, f"in host memory for each of {local_ranks} ranks"


def check_weights(n_bytes: int, device: torch.device, local_ranks: int, *, staging: int = 0) -> None:
    """Refuse weights, and ``staging`` bytes of buffers for moving experts, that do not fit on this rank, before any memory is taken.

    Raises:
        ValueError: with what they take and what there is.
    """
    free, where = room_of(device, local_ranks)
    if n_bytes + staging > free:
        moving = f" and buffers of moving experts {staging / 1e9:.1f} GB" if staging else ""
        need = f"the weights of this rank take {n_bytes / 1e9:.1f} GB{moving}, {free / 1e9:.1f} GB are free {where}"
        fewer = "lower staging_experts of eplb_config, " if staging else ""
        raise ValueError(f"{need}; {fewer}use more ranks (--tp-size, --pp-size, or --dp-size for the experts), or a smaller model")


def size_pool(config: EngineConfig, device: torch.device, local_ranks: int, *, max_model_len: int, bytes_per_token: int) -> int:
    """Pages of one rank's KV pool, as ``pool_pages`` says, none of it taken yet.

    Raises:
        ValueError: not even one page fits, a setting is out of range, or what was asked for is more than there is.
    """
    available = free_bytes(device, config, local_ranks)
    pages = pool_pages(config, max_model_len=max_model_len, bytes_per_token=bytes_per_token, available=available)
    free, where = room_of(device, local_ranks)
    tables = request_table_bytes(max_num_seqs=config.max_num_seqs, max_len=max_model_len, page_size=config.page_size)
    page, asked = bytes_per_token * config.page_size, config.max_total_tokens
    pool = (pages + 1) * page  # one page is for padding
    left = free if asked is not None else free - pool
    if tables > left:
        who = f"tables of max_num_seqs {config.max_num_seqs} requests of max_model_len {max_model_len} tokens"
        beside = "" if asked is not None else " beside the KV pool"
        fix = "lower max_num_seqs or max_model_len" + (", or gpu_memory_utilization" if beside and device.type == "cuda" else "")
        raise ValueError(f"{who} take {tables} bytes, {left} are free {where}{beside}; {fix}")
    if asked is not None and pool > free - tables:
        most = ((free - tables) // page - 1) * config.page_size
        fix = f"lower it to {most} or less, or leave it out" if most > 0 else "not one page fits: use more ranks or a smaller page_size"
        raise ValueError(
            f"max_total_tokens {asked} takes {pool} bytes ({pages} pages of {config.page_size} tokens, and "
            f"one for padding), {free - tables} are free {where}; {fix}"
        )
    return pages


def pool_pages(config: EngineConfig, *, max_model_len: int, bytes_per_token: int, available: int) -> int:
    """Pages of one rank's KV pool: what was asked for, else what fits, at most what all running requests can use.

    Raises:
        ValueError: not even one page fits, or a setting is out of range.
    """
    page = config.page_size
    if config.max_total_tokens is not None:
        if config.max_total_tokens < page:
            raise ValueError(
                f"max_total_tokens {config.max_total_tokens} is less than one page of {page} tokens; raise it to at least {page}"
            )
        return config.max_total_tokens // page
    useful = config.max_num_seqs * -(-max_model_len // page)
    fits = available // (bytes_per_token * page) - 1  # one more is the dummy
    if fits < 1:
        raise ValueError(
            f"no KV page fits: one page of {page} tokens takes {bytes_per_token * page} bytes, as does one for padding, "
            f"{available} bytes are free; "
            "use more ranks, a smaller page_size or a narrower kv_cache_dtype; on a GPU raise gpu_memory_utilization, "
            f"on CPUs free host memory, of which ranks take {CPU_SHARE:.0%}"
        )
    return min(useful, fits)
