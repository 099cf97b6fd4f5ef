"""What the settings of expert parallelism come to: refusals, and the terms that the ranks exchange tokens on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..comm.dispatcher import Dispatcher, EPSpec
from ..comm.select import explain
from ..comm.wire import workspace_bytes
from ..parallel.grid import Grid
from .graph_key import graph_sizes

if TYPE_CHECKING:
    from .config import EngineConfig
    from .model_config import ModelConfig

#: backends that hold a workspace which all ranks map
OVER_MEMORY = ("symm", "nvshmem", "shm")


def check_expert_settings(config: EngineConfig) -> None:
    """Refuse settings of expert parallelism that do not go together, whatever the machine is."""
    if config.enable_two_batch_overlap and config.kv_offload != "off":
        raise ValueError(
            f"enable_two_batch_overlap does not go with kv_offload {config.kv_offload}: hot rows are kept step by step, not by halves of "
            "one; leave one of them out"
        )
    if config.ep_fault_tolerant:
        for name, found, wanted in (
            ("tensor_parallel_size", config.tensor_parallel_size, 1),
            ("pipeline_parallel_size", config.pipeline_parallel_size, 1),
            ("enable_deterministic_inference", config.enable_deterministic_inference, False),
        ):
            if found != wanted:
                raise ValueError(f"ep_fault_tolerant needs {name} {wanted}, found {found}: such a step cannot do without a rank")


def most_tokens(config: EngineConfig) -> int:
    """Most tokens of one replica that meet their experts in one call: a step's, or those of the largest graph, or half of that."""
    step = config.max_num_batched_tokens
    if not config.enforce_eager:
        step = max(step, graph_sizes(config.max_num_seqs, config.cuda_graph_max_bs, config.cuda_graph_bs)[-1])
    if not config.enable_two_batch_overlap:
        return step
    whole = max(2, config.two_batch_overlap_min_tokens) - 1  # tokens of the largest step that is not cut
    return max(-(-step // 2), min(step, whole))


def exchange_spec(config: EngineConfig, model: ModelConfig, *, n_ranks: int, tp: int, n_slots: int, dtype: torch.dtype) -> EPSpec:
    """The terms of a rank's exchange. ``n_ranks``: ranks the experts are spread over; ``tp``: ranks that share a replica's tokens."""
    assert model.moe is not None
    return EPSpec(
        n_ranks=n_ranks,
        n_slots=n_slots,
        hidden=model.hidden,
        top_k=model.moe.top_k,
        max_tokens=-(-most_tokens(config) // (tp if n_ranks > 1 else 1)),  # each tp rank sends its slice of the tokens
        payload="native" if config.moe_payload == "auto" else config.moe_payload,
        deterministic=config.enable_deterministic_inference,
        dtype=str(dtype).removeprefix("torch."),
        depth=2 if config.enable_two_batch_overlap else 1,
        timeout_ms=round(1000 * config.dist_timeout),
        fault_tolerant=config.ep_fault_tolerant,
    )


def halves_from(config: EngineConfig) -> int | None:
    """Tokens of the busiest replica from which a step is cut in halves; None: never."""
    return config.two_batch_overlap_min_tokens if config.enable_two_batch_overlap else None


def check_dispatcher(config: EngineConfig, dispatcher: Dispatcher | None, *, shares_selection: bool) -> None:
    """Refuse settings that mean nothing with the model and its dispatcher, None without experts.

    ``shares_selection``: the stage takes a selection of keys from the one before.

    Raises:
        ValueError: naming the setting, what was found and what to do.
    """
    if config.enable_two_batch_overlap and (dispatcher is None or dispatcher.spec.n_ranks == 1):
        why = "the model has no experts" if dispatcher is None else "all of them are on this rank"
        raise ValueError(
            f"enable_two_batch_overlap hides the way of tokens to experts on other ranks, but {why}; leave it out"
            + ("" if dispatcher is None else ", or spread them (--dp-size, --tp-size)")
        )
    if config.enable_two_batch_overlap and shares_selection:
        raise ValueError(
            "enable_two_batch_overlap does not go with a pipeline stage that begins with a layer which shares the selection of keys of the "
            "stage before; leave it out, or use --pp-size 1"
        )
    if config.ep_fault_tolerant and dispatcher is None:
        raise ValueError("ep_fault_tolerant is about expert ranks, but the model has no experts; leave it out")


def exchange_bytes(spec: EPSpec, backend: str) -> int:
    """Device bytes that a rank's dispatcher holds from the start: its workspace, and the choices that arrive."""
    if backend not in OVER_MEMORY or spec.n_ranks == 1:
        return 0
    return workspace_bytes(spec) + 8 * spec.depth * spec.n_ranks * spec.max_tokens * spec.top_k


def describe_exchange(config: EngineConfig, dispatcher: Dispatcher, grid: Grid) -> str:
    """How experts' tokens travel and why so, in one line."""
    spec, name = dispatcher.spec, dispatcher.name
    why = next((reason for other, _, reason in explain(grid, spec) if other == name), "")
    chosen = f"{name} (chosen by auto: {why})" if config.moe_a2a_backend == "auto" else name
    held = exchange_bytes(spec, name)
    room = f", workspace of {held / 2**20:.0f} MiB" if held else ""
    payload = "" if spec.payload == "native" else f", payload {spec.payload}"
    halves = f"; steps of {config.two_batch_overlap_min_tokens} tokens or more in halves" if config.enable_two_batch_overlap else ""
    return f"Experts on {spec.n_ranks} ranks: {chosen}, up to {spec.max_tokens} tokens a rank and call{room}{payload}{halves}"
