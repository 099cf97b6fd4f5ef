"""What the settings of expert balancing come to, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..parallel.debug import debugging
from ..parallel.json_text import parse_json

if TYPE_CHECKING:
    from .config import EngineConfig

#: field of the engine's settings -> key of ``eplb_config`` that means the same
_FLAGS = {
    "num_redundant_experts": "num_redundant_experts",
    "eplb_step_interval": "step_interval",
    "eplb_window_size": "window_size",
    "eplb_bytes_per_step": "bytes_per_step",
}
#: values of ``policy``; ``random`` plans valid placements at random, to test that no token changes
POLICIES = ("default", "random")
#: ends of the names of files that can hold the load of many steps
_STEP_FORMATS = (".pt", ".parquet", ".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class EPLBSettings:
    """Settings of balancing; the first seven have vLLM's names and, where there is one, its default."""

    num_redundant_experts: int = 0  # slots of a layer beyond one for every expert
    step_interval: int = 3000  # steps from one look at the load to the next
    window_size: int = 1000  # most recent steps whose load counts
    log_balancedness: bool = False  # log how even the load of the ranks is
    log_balancedness_interval: int = 1  # every so many looks
    use_async: bool = True  # experts travel beside the steps; there is no other way
    policy: str = "default"  # planner, one of POLICIES
    bytes_per_step: int = 256 << 20  # most bytes of experts that a rank receives, and most that it sends, from one step to the next
    staging_experts: int = 4  # experts that a rank can receive before they take their places; it has buffers for one more
    horizon_steps: int | None = None  # steps over which a move has to pay; None: until the next look
    patience_steps: int = 500  # steps after which planning, or a part of a move, that a rank has not finished is given up
    max_cycle_steps: int = 20_000  # steps after which a move that has not ended is given up
    objective: str = "tokens"  # what planners even out: tokens, activated (experts), or predicted seconds
    dispatch_interval: int = 16  # steps, at least, from one refill of the copies' shares to the next, with ep_dispatch_algorithm lp
    target: float = 1.02  # largest over mean load at which a re-plan stops
    seed: int = 0  # of the policy random

    @property
    def horizon(self) -> int:
        """Steps over which a move has to pay."""
        return self.step_interval if self.horizon_steps is None else self.horizon_steps


def eplb_settings(config: EngineConfig) -> EPLBSettings:
    """The settings of balancing from flags and ``eplb_config``, whether or not ``enable_eplb`` is on.

    Raises:
        ValueError: JSON that is no mapping of known keys to values of their kind, a flag that says otherwise, a value out of range.
    """
    given = _parse(config.eplb_config)
    for flag, key in _FLAGS.items():
        value = getattr(config, flag)
        if value is None:
            continue
        if key in given and given[key] != value:
            raise ValueError(f"{flag} is {value}, but eplb_config says {key} {given[key]}; give one of them")
        given[key] = value
    settings = replace(EPLBSettings(), **given)
    _check_values(settings)
    return settings


def uses_placement(config: EngineConfig) -> bool:
    """Whether experts may be elsewhere than in order, one slot each."""
    return config.enable_eplb or bool(eplb_settings(config).num_redundant_experts) or config.init_expert_location != "trivial"


def check_eplb_settings(config: EngineConfig) -> None:
    """Refuse settings of balancing that make no sense whatever the model is.

    Raises:
        ValueError: naming the setting, what was found and what to do.
    """
    settings = eplb_settings(config)
    if config.expert_distribution_recorder_buffer_size < 1:
        raise ValueError(
            f"expert_distribution_recorder_buffer_size must be at least 1, found {config.expert_distribution_recorder_buffer_size}"
        )
    if config.expert_distribution_dump is not None and config.expert_distribution_recorder_mode is None:
        raise ValueError("expert_distribution_dump needs something recorded; add expert_distribution_recorder_mode stat")
    if config.expert_distribution_dump is not None and Path(config.expert_distribution_dump).suffix not in _STEP_FORMATS:
        ends, found = ", ".join(_STEP_FORMATS), config.expert_distribution_dump
        raise ValueError(f"expert_distribution_dump must end in one of {ends}, which hold steps, found {found!r}")
    if config.ep_dispatch_algorithm == "lp":
        _check_fill(config)
    if not uses_placement(config):
        return
    what = "enable_eplb" if config.enable_eplb else "num_redundant_experts" if settings.num_redundant_experts else "init_expert_location"
    ranks = config.data_parallel_size * config.tensor_parallel_size
    if ranks == 1 or config.expert_parallel_size == 1:
        raise ValueError(
            f"{what} is about experts on different ranks, but every rank has all experts; leave it out, or spread them "
            "(--dp-size, --tp-size, without --ep-size 1)"
        )
    if config.enable_eplb:
        _check_live(config)


def _check_fill(config: EngineConfig) -> None:
    """Refuse shares by load where there is nothing to share, or no load."""
    if not uses_placement(config):
        raise ValueError(
            "ep_dispatch_algorithm lp shares tokens over copies of experts, but there are none; add --num-redundant-experts, or use static"
        )
    if not config.enable_expert_load:
        raise ValueError("ep_dispatch_algorithm lp needs the load of experts; leave out --no-enable-expert-load")


def _check_live(config: EngineConfig) -> None:
    """Refuse what experts cannot move under."""
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            f"enable_eplb needs pipeline_parallel_size 1, found {config.pipeline_parallel_size}: stages do not agree on a step at which "
            "experts change places; num_redundant_experts and init_expert_location work without it"
        )
    if config.ep_fault_tolerant:
        raise ValueError(
            "enable_eplb does not go with ep_fault_tolerant: a move needs the word of every rank; leave one of them out"
        )  # fmt: skip
    if not config.enable_expert_load:
        raise ValueError("enable_eplb needs the load of experts; leave out --no-enable-expert-load")


def _parse(given: Any) -> dict[str, Any]:
    """``eplb_config`` as settings: JSON, or a mapping from a caller in Python."""
    if given is None:
        return {}
    try:
        found = dict(given) if isinstance(given, Mapping) else parse_json(given)
    except json.JSONDecodeError as error:
        raise ValueError(f'eplb_config is not JSON ({error}); for example \'{{"window_size": 1000, "step_interval": 3000}}\'') from None
    if not isinstance(found, dict):
        raise ValueError(f"eplb_config must be a JSON object, found {type(found).__name__}")
    kinds = {entry.name: str(entry.type) for entry in fields(EPLBSettings)}
    for key, value in found.items():
        if key not in kinds:
            raise ValueError(f"eplb_config has no key {key!r}; known: {', '.join(kinds)}")
        _check_kind(key, kinds[key], value)
    return found


def _check_kind(key: str, kind: str, value: Any) -> None:
    """Refuse a value of another kind; ``kind`` is the field's annotation."""
    wanted = kind.removesuffix(" | None")
    if value is None and kind != wanted:
        return
    allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    if not isinstance(value, allowed[wanted]) or (isinstance(value, bool) and wanted != "bool"):
        raise ValueError(f"eplb_config: {key} must be of kind {wanted}, found {value!r}")


def _check_values(settings: EPLBSettings) -> None:
    """Refuse values out of range."""
    least = {"num_redundant_experts": 0, "step_interval": 1, "window_size": 1, "log_balancedness_interval": 1, "bytes_per_step": 1}
    least |= {"staging_experts": 1, "horizon_steps": 1, "patience_steps": 2, "max_cycle_steps": 4, "seed": 0, "dispatch_interval": 1}
    for key, lowest in least.items():
        value = getattr(settings, key)
        if value is not None and value < lowest:
            raise ValueError(f"{key} of expert balancing must be at least {lowest}, found {value}")
    if not 1.0 <= settings.target <= 100.0:
        raise ValueError(f"target of expert balancing is largest over mean load, 1 or more, found {settings.target}")
    if settings.policy not in POLICIES:
        raise ValueError(f"policy of expert balancing must be one of {', '.join(POLICIES)}, found {settings.policy!r}")
    if settings.policy == "random" and not debugging():
        raise ValueError("policy random moves experts about for nothing and is there for tests: it needs RORQUAL_DEBUG=1; use default")
    if settings.objective not in ("tokens", "activated", "seconds"):
        raise ValueError(f"objective of expert balancing must be tokens, activated or seconds, found {settings.objective!r}")
    if not settings.use_async:
        raise ValueError("use_async false: experts always travel beside the steps here; leave it out")
