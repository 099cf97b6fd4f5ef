"""Input that no machine, load or file of a sound run has is refused in words, and never planned for."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rorqual.moe.eplb.api import make_plan
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.formats import ExpertMap, read_load, write_load
from rorqual.moe.eplb.formats.merge import merge
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.planner.static import plan_static
from rorqual.moe.eplb.replan.advise import advise
from rorqual.moe.eplb.report.gather import gather
from rorqual.moe.eplb.simulation.replay import simulate
from rorqual.moe.eplb.simulation.rules import Rules
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace

NAN, INF = float("nan"), float("inf")
TINY = SynthConfig(n_layers=2, n_experts=8, top_k=2, n_steps=6, tokens=64)
LOAD = np.array([[5.0, 1.0, 3.0, 2.0]])
MACHINE = Topology.even(n_slots=6, n_ranks=3)


@pytest.mark.parametrize("speed", [0.0, -1.0, NAN, INF])
def test_speeds_are_finite_and_above_zero(speed) -> None:
    with pytest.raises(ValueError, match="speeds must be 2 finite numbers above 0"):
        Topology(slots=(1, 1), nodes=(0, 0), speeds=(1.0, speed))


@pytest.mark.parametrize(
    "field, value",
    [("token_seconds", NAN), ("expert_seconds", INF), ("fixed_seconds", -1.0), ("expert_bytes", 0), ("copy_bytes_per_second", NAN)],
)
def test_prices_make_a_time(field, value) -> None:
    with pytest.raises(ValueError, match="cost: "):
        replace(CostModel(), **{field: value})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"drift": INF}, "finite"), ({"drift": NAN}, "finite"), ({"seed": -1}, "seed=-1"), ({"first_layer": -5}, "first_layer=-5"),
        ({"tokens": 10**19}, "tokens at most"), ({"decode_tokens": 10**19}, "tokens at most"),
    ],
)  # fmt: skip
def test_made_loads(change, message) -> None:
    with pytest.raises(ValueError, match=f"synth: .*{message}"):
        replace(TINY, **change)


@pytest.mark.parametrize("change", [{"n_groups": 0}, {"plan_seconds": NAN}, {"rest_seconds": INF}])
def test_rules_of_a_simulation(change) -> None:
    with pytest.raises(ValueError, match="simulate: "):
        Rules(**change)


@pytest.mark.parametrize("change", [{"horizon_steps": -5}, {"budget_bytes": -1}, {"target": INF}, {"target": NAN}, {"steps": INF}])
def test_limits_of_a_plan(change) -> None:
    before = plan_static(LOAD, MACHINE).slot_to_expert
    with pytest.raises(ValueError, match="must be"):
        make_plan(LOAD, MACHINE, previous=before, **change)
    with pytest.raises(ValueError, match="target of 1 or more"):
        advise(LOAD, n_ranks=3, target=NAN)


def test_counts_whose_sums_overflow_are_refused() -> None:
    counts = np.full((4, 1, 2), 2**62, dtype=np.int64)  # their sum over steps would be 0
    with pytest.raises(ValueError, match="sums would overflow"):
        LoadTrace(counts=counts, layer_ids=(3,))


@pytest.mark.parametrize("name", ["load.jsonl", "load.json"])
def test_a_load_that_lost_steps_is_not_read(tmp_path, name) -> None:
    trace = replace(synth(TINY), tokens=None, phase=None, domain=None)
    path = write_load(trace, tmp_path / name)
    assert (read_load(path).counts == trace.counts).all()
    if name.endswith("l"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    else:
        whole = json.loads(path.read_text())
        path.write_text(json.dumps(whole | {"expert_load_window": whole["expert_load_window"][:4]}))
    with pytest.raises(ValueError, match="6 steps were written and 4 are there"):
        read_load(path)


def test_loads_of_different_models_are_not_summed() -> None:
    with pytest.raises(ValueError, match=r"top_k \[2, 3\]"):
        merge([synth(TINY), synth(replace(TINY, top_k=3))])


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF])
def test_a_scale_is_above_zero(tmp_path, scale) -> None:
    with pytest.raises(ValueError, match="scale must be a finite number above 0"):
        read_load(write_load(synth(TINY), tmp_path / "load.parquet"), scale=scale)


def test_layer_ids_that_number_no_layers(tmp_path) -> None:
    trace = synth(TINY)
    path = write_load(trace, tmp_path / "load.parquet")
    with pytest.raises(ValueError, match="some twice"):
        read_load(path, layer_ids=(3, 3))
    for ids in ((3, 3), (-1, 3)):
        with pytest.raises(ValueError, match="0 or more, each once"):
            write_load(replace(trace, layer_ids=ids), tmp_path / "load.pt")
    with pytest.raises(ValueError, match="0 or more and differ"):
        ExpertMap(slot_to_expert=np.zeros((1, 1), dtype=np.int64), n_experts=1, layer_ids=(-1,))


@pytest.mark.parametrize(
    "machine, message",
    [
        (MACHINE, "layer 0 has no slot for 1 experts: 7"),
        (replace(MACHINE, failed=frozenset([2])), r"4 slots of failed ranks \[2\] hold experts"),
    ],
)
def test_maps_that_leave_tokens_out_are_not_measured(machine, message) -> None:
    trace, machine = synth(TINY), replace(machine, slots=(5, 5, 2))
    lost = np.tile([0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], (2, 1))
    with pytest.raises(ValueError, match=message):
        simulate(trace, machine, ["none"], rules=Rules(interval=2, window=2), start=lost)
    for maps in ({"before": lost}, {"after": lost}):
        with pytest.raises(ValueError, match=message):
            gather(trace, machine, rules=Rules(interval=2, window=2), **maps)
