"""What settings mean on this machine and for this model: device, dtypes, longest request, degrees of parallelism."""

from __future__ import annotations

import os

import torch

from ..parallel.grid import GridSpec
from .config import EngineConfig
from .model_config import ModelConfig


def resolve_device(name: str) -> torch.device:
    """'auto', 'cpu' or 'cuda' as this rank's device.

    Raises:
        ValueError: CUDA was asked for and is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu, or install a CUDA build of torch")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def resolve_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """The compute dtype: what was asked for, else the checkpoint's."""
    dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
    return dtype


def resolve_max_len(config: EngineConfig, model: ModelConfig) -> int:
    """Longest prompt plus output, in tokens.

    Raises:
        ValueError: more than the model has positions.
    """
    limit, asked = model.max_position, config.max_model_len
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len {asked} is more than the model's {limit} positions; use at most {limit}")
    return asked or limit


def grid_spec(config: EngineConfig) -> GridSpec:
    """The degrees of parallelism asked for."""
    return GridSpec(
        pp=config.pipeline_parallel_size,
        dp=config.data_parallel_size,
        tp=config.tensor_parallel_size,
        ranks_per_node=config.ranks_per_node,
    )


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> str:
    """Format of the cached rows; float16 computes on bfloat16 rows, which have its width and more range."""
    name = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else str(dtype).removeprefix("torch.")
    return "bfloat16" if name == "float16" else name


def index_dtype(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> str:
    """Format of the cached index keys.

    Raises:
        ValueError: one is asked for, but the model has no indexer.
    """
    if config.index_cache_dtype == "auto":
        return kv_dtype(config, dtype)
    if model.attention.indexer is None:
        raise ValueError(f"index_cache_dtype {config.index_cache_dtype} is of no use: the model has no indexer; use auto, or leave it out")
    return config.index_cache_dtype
