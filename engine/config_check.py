"""Refusals of settings that make no sense whatever the model is."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from .eplb_settings import check_eplb_settings
from .expert_settings import check_expert_settings
from .graph_key import graph_sizes
from .offload_settings import check_offload_settings

if TYPE_CHECKING:
    from .config import EngineConfig


def check_config(config: EngineConfig) -> None:
    """Refuse settings that make no sense whatever the model is.

    Raises:
        ValueError: naming the setting, the value and what is allowed.
    """
    for entry in fields(config):
        value, choices = getattr(config, entry.name), entry.metadata["choices"]
        if choices is not None and value not in choices and (value is not None or entry.default is not None):
            raise ValueError(f"{entry.name} must be one of {', '.join(choices)}, found {value!r}")
        _check_number(entry.name, str(entry.type), value)
    check_page_size(config.page_size)
    for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
                 "two_batch_overlap_min_tokens"):  # fmt: skip
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, found {getattr(config, name)}")
    graph_sizes(config.max_num_seqs, config.cuda_graph_max_bs, config.cuda_graph_bs)
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, found {config.gpu_memory_utilization}")
    if not 0.0 < config.dist_timeout <= 1e6:  # written so that NaN is refused too
        raise ValueError(f"dist_timeout must be above 0 seconds and at most 1000000, found {config.dist_timeout}")
    if not config.max_clock_skew >= 0.0:
        raise ValueError(f"max_clock_skew must be 0 seconds or more, found {config.max_clock_skew}")
    check_offload_settings(config)
    check_expert_settings(config)
    check_eplb_settings(config)
    if config.seed < 0:
        raise ValueError(f"seed must be 0 or more, found {config.seed}")
    if config.max_model_len is not None and config.max_model_len < 2:
        raise ValueError(f"max_model_len must be at least 2 (one prompt token and one output token), found {config.max_model_len}")


def check_page_size(page_size: int) -> None:
    """Refuse a page that kernels do not know.

    Raises:
        ValueError: naming it and what is allowed.
    """
    if page_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        raise ValueError(f"page_size {page_size} is not a power of two from 1 to 256")


def _check_number(name: str, kind: str, value: Any) -> None:
    """Refuse what is no number where one is wanted; ``kind`` is the field's annotation."""
    wanted = kind.removesuffix(" | None")
    allowed = {"int": Integral, "float": Real}.get(wanted)
    if allowed is None or (value is None and kind != wanted):
        return
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{name} must be {'a whole number' if wanted == 'int' else 'a number'}, found {value!r}")
