"""Weights of a rank before they have memory: the same bytes as those of the stage that is built, on every layout."""

from __future__ import annotations

import pytest
import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.models.build import build_stage
from rorqual.engine.models.skeleton import Place, make_skeleton
from rorqual.engine.weights.hub import embedded_model, shape_folder
from rorqual.parallel.grid import Grid, GridSpec

CPU = torch.device("cpu")


def skeleton(folder, spec: GridSpec, pp_rank: int = 0, **settings):
    config = EngineConfig(model=str(folder), **settings)
    return make_skeleton(parse_model_config(folder), config, Place.planned(spec, pp_rank), CPU, torch.bfloat16)


def test_bytes_are_those_of_the_stage() -> None:
    folder = embedded_model()
    stage = build_stage(parse_model_config(folder), EngineConfig(model=str(folder)), Grid.single(CPU), torch.bfloat16)
    planned = skeleton(folder, GridSpec())
    assert planned.n_bytes == sum(p.numel() * p.element_size() for p in stage.model.parameters())
    assert sum(planned.part_bytes().values()) == planned.n_bytes
    assert planned.layers == stage.layers


def test_parts_of_other_layouts() -> None:
    folder = embedded_model()
    whole = skeleton(folder, GridSpec()).part_bytes()
    split = skeleton(folder, GridSpec(tp=2, dp=2)).part_bytes()
    assert split["routed experts"] * 4 == whole["routed experts"]
    assert split["embedding"] * 2 == whole["embedding"] and split["router"] == whole["router"]
    stages = [skeleton(folder, GridSpec(pp=2), rank) for rank in range(2)]
    assert sum(stage.n_bytes for stage in stages) == sum(whole.values())
    assert "embedding" in stages[0].part_bytes() and "head" in stages[1].part_bytes()


def test_fp8_weights_stay_narrow_where_a_backend_multiplies_them() -> None:
    folder = shape_folder("v3.2-slice")
    wide, narrow = (skeleton(folder, GridSpec(), fp8_gemm_backend=name).part_bytes() for name in ("dequantise", "torch"))
    assert wide["routed experts"] * (1 + 4 / 128**2) / 2 == narrow["routed experts"]
    assert wide["head"] == narrow["head"] and wide["router"] == narrow["router"]


def test_a_layout_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide over tensor_parallel_size 3; valid sizes"):
        skeleton(embedded_model(), GridSpec(tp=3))
