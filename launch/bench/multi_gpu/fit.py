"""How much of a model fits on the GPUs that there are, and how much work into the time that is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .shapes import changed


def fitting_layers(
    name: str, most: int, *, ranks: int, settings: dict[str, Any], gpu_bytes: int, host_bytes: int, shape: dict[str, Any] | None = None
) -> int:
    """The most layers, ``most`` at most, whose weights, cache and workspaces a rank's GPU and host hold, as ``rorqual plan`` counts.

    Args:
        name: of the configuration that ``shape`` changes.
        most: layers of the whole model.
        ranks: replicas, over which the experts are spread.
        settings: of the engine; ``max_model_len``, ``max_num_seqs`` and ``max_total_tokens`` among them.
        gpu_bytes: memory of one GPU.
        host_bytes: memory of the host that pools may take.
        shape: values of the configuration.

    Raises:
        ValueError: not even one layer with experts beside the dense ones fits.
    """
    dense = int((shape or {}).get("first_k_dense_replace") or 1)
    low, high = dense + 1, most

    def refused(layers: int) -> str:
        return _refused(name, layers, ranks, settings, gpu_bytes, host_bytes, shape)

    if not refused(most):
        return most
    if why := refused(low):
        raise ValueError(f"not even {low} layers fit on {ranks} GPUs: {why}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refused(middle) else (middle, high)
    return low


def _refused(
    name: str, layers: int, ranks: int, settings: dict[str, Any], gpu_bytes: int, host_bytes: int, shape: dict[str, Any] | None
) -> str:
    """Why so many layers do not fit; '' where they do."""
    from ....engine.config import EngineConfig
    from ....parallel.grid import GridSpec
    from ...plan import Machine, plan

    mode = settings.get("kv_offload", "off")
    machine = Machine(gpu_bytes=gpu_bytes, host_bytes=host_bytes, ranks_per_host=ranks, link_bytes_per_s=50e9)
    context, seqs = settings["max_model_len"], settings["max_num_seqs"]
    with changed(name, **{**(shape or {}), "num_hidden_layers": layers}) as folder:
        names = ("kv_cache_dtype", "max_total_tokens", "max_num_batched_tokens", "gpu_memory_utilization", "dtype")
        config = replace(EngineConfig(model=folder), **{k: settings[k] for k in names if k in settings})
        try:
            found = plan(config, GridSpec(dp=ranks), machine, context=context, max_num_seqs=seqs)
        except ValueError as error:
            return str(error)
    # Engines with and without the pool shall have as many layers, and more is on the device without.
    return str(found["refused"].get("off") or found["refused"].get(mode, ""))


def requests_in_time(wanted: int, tokens: int, *, tokens_per_s: float, seconds: float) -> int:
    """How many of ``wanted`` requests of ``tokens`` each a replica fills in ``seconds``; 0 where not one."""
    if tokens_per_s <= 0.0:
        return wanted
    return max(0, min(wanted, int(seconds * tokens_per_s / tokens)))
