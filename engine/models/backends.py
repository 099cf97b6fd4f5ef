"""Which operations a rank runs by, and which of its weights stay FP8."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch

from ...attention.ops import AttentionOps
from ...moe.ops import MoEOps
from ...parallel.grid import Grid
from ...parallel.linear import BLOCK, check_fp8_device
from ...parallel.shard import narrow_weights
from ..config import EngineConfig
from ..model_config import ModelConfig
from ..side import SideStream
from .deepseek import DeepseekForCausalLM
from .shards import FP8_LINEARS

_MOST_TOPK, _MOST_EXPERTS = 4096, 512  # what the Triton kernels hold


def pick_ops(config: EngineConfig, model: ModelConfig, grid: Grid) -> tuple[AttentionOps | None, MoEOps | None]:
    """The operations of attention and of experts: Triton's on CUDA, none (the torch path) elsewhere, unless asked otherwise.

    Raises:
        ValueError: a backend was asked for that cannot be used here, or that the model is too large for.
    """
    device = grid.device

    def wanted(name: str) -> bool:
        if name in ("triton", "flash_mla") and device.type != "cuda":
            raise ValueError(f"the {name} backend needs a CUDA device, this rank runs on {device.type}; use auto or torch")
        return name in ("triton", "flash_mla") or (name == "auto" and device.type == "cuda" and find_spec("triton") is not None)

    check_fp8_device(config.fp8_gemm_backend, device)
    attention, moe = None, None
    if wanted(config.attention_backend):
        _check_attention(model)
        attention = _overlapping(AttentionOps.load(config.attention_backend), config, grid)
    if wanted(config.moe_runner_backend):
        if model.moe is not None and model.moe.n_experts > _MOST_EXPERTS:
            limit = f"the Triton router takes at most {_MOST_EXPERTS} routed experts"
            raise ValueError(f"{limit}, the model has {model.moe.n_experts}; use --moe-runner-backend torch")
        moe = MoEOps.load("triton")
    return attention, moe


def _overlapping(ops: AttentionOps, config: EngineConfig, grid: Grid) -> AttentionOps:
    """``ops`` that compute queries beside the choice of their keys and, if asked for, fetch missing rows beside the queries' products.

    Steps of several tp ranks or stages are never captured, and one product is faster there.
    """
    if grid.device.type != "cuda":
        return ops
    if grid.spec.tp == grid.spec.pp == 1:  # with enforce_eager too, so that it computes the same bits
        ops = replace(ops, aside=SideStream(grid.device, captured_only=True, urgent=False))
    if config.kv_offload != "off" and config.kv_overlap_fetch:
        ops = replace(ops, beside=SideStream(grid.device))
    return ops


def _check_attention(model: ModelConfig) -> None:
    """Refuse an indexer that the kernels cannot run."""
    indexer = model.attention.indexer
    if indexer is None:
        return
    for what, value in (("index_n_heads", indexer.n_heads), ("index_head_dim", indexer.head_dim)):
        if value & (value - 1):
            raise ValueError(f"the Triton indexer needs {what} to be a power of two, the model has {value}; use --attention-backend torch")
    if indexer.topk > _MOST_TOPK:
        limit = f"the Triton top-k keeps at most {_MOST_TOPK} keys"
        raise ValueError(f"{limit}, the model's index_topk is {indexer.topk}; use --attention-backend torch")


def keeps_fp8(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether FP8 weights of the checkpoint stay FP8: on CUDA by default, elsewhere when a backend is named."""
    block = (model.quantization or {}).get("weight_block_size")
    if block is None or list(block) != [BLOCK, BLOCK] or config.fp8_gemm_backend == "dequantise":
        return False
    return config.fp8_gemm_backend != "auto" or (device.type == "cuda" and find_spec("triton") is not None)


def narrow(model: DeepseekForCausalLM, config: ModelConfig, inner: slice) -> None:
    """Make linears and experts block FP8, but for what the checkpoint says it left wide (``modules_to_not_convert``).

    Experts stay wide too where this rank's part of their width, ``inner``, cuts a block.
    """
    wide = tuple((config.quantization or {}).get("modules_to_not_convert") or ())
    narrow_weights(model, FP8_LINEARS, wide)
    if inner.start % BLOCK or (inner.stop - inner.start) % BLOCK:
        return
    for layer in model.moe_layers():
        if not any(name in f"model.layers.{layer.layer}.mlp.experts" for name in wide):
            layer.experts.narrow()
