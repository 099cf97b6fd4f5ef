"""SGLang's ``--init-expert-location`` (``.pt``, ``.json`` or JSON as text): rows are the model's layers, dense ones included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Ints
from .expert_map import ExpertMap
from .files import Raw, write_pt
from .options import Format, ReadOptions
from .values import expert_count, integers


def matches(raw: Raw) -> bool:
    """A dict with the map of slots."""
    return raw.kind in ("pt", "json") and isinstance(raw.data, dict) and "physical_to_logical_map" in raw.data


def read(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Rows of all model layers."""
    slots = integers(raw.data["physical_to_logical_map"], f"{raw.name}: physical_to_logical_map", 2)
    return numbered_map(slots, tuple(range(len(slots))), raw.name, options)


def numbered_map(slots: Ints, layer_ids: tuple[int, ...], name: str, options: ReadOptions, meta: dict[str, str] | None = None) -> ExpertMap:
    """A map of slots [layers, slots]; without a number of experts there are as many as the largest id says."""
    if slots.size == 0:
        raise ValueError(f"{name}: the map has no slots, found shape {slots.shape}")
    n_experts = expert_count(slots, options.n_experts, name)
    try:
        return ExpertMap(slot_to_expert=slots, n_experts=n_experts, layer_ids=layer_ids, topology=options.topology, meta=meta or {})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def write(expert_map: ExpertMap, path: Path) -> None:
    """Rows of layers that are not in the map hold expert s % experts in slot s. SGLang takes no key besides this one."""
    expert_map.refuse_gaps("SGLang's init-expert-location")
    whole: dict[str, Any] = {"physical_to_logical_map": expert_map.for_every_layer()}
    if path.suffix == ".pt":
        write_pt(whole, path)
    else:
        path.write_text(json.dumps({name: np.asarray(value).tolist() for name, value in whole.items()}), encoding="utf-8")


FORMATS = [
    Format(
        name="sglang-map",
        what="map",
        suffixes=(".pt", ".json"),
        about="SGLang --init-expert-location: physical_to_logical_map [model layers, slots]",
        matches=matches,
        read=read,
        write=write,
    )
]
