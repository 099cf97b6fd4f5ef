"""What is said of a load."""

import numpy as np
import pytest

from rorqual.moe.eplb.analysis import analyze
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace

MACHINE = Topology.even(n_slots=40, n_ranks=8)


def test_a_load_that_stays_is_seen_to_and_a_plan_from_its_past_helps():
    trace = synth(
        SynthConfig(n_layers=3, n_experts=32, top_k=4, n_steps=60, tokens=65536, decode_tokens=16384, domains=("a", "b"), dwell=2)
    )
    found = analyze(trace, MACHINE)
    assert set(found.experts) == {"all steps", "phase prefill", "phase decode", "domain a", "domain b", "single steps"} == set(found.ranks)
    assert found.persistence is not None and found.persistence.mean() > 0.6 > found.chance == 0.25
    assert found.foresight.promised < found.foresight.planned < found.foresight.in_order
    assert found.foresight.seconds_planned < found.foresight.seconds_in_order
    for layer in range(3):
        assert trace.total[layer, found.hottest[layer, 0]] == trace.total[layer].max()
        assert found.hot_share[layer] == pytest.approx(np.sort(trace.total[layer])[-8:].sum() / trace.total[layer].sum())


def test_a_load_that_turns_round_has_no_persistence():
    counts = np.ones((4, 1, 32), dtype=np.int64)
    counts[:2, 0, :8] = np.arange(20, 100, 10)
    counts[2:, 0, 8:16] = np.arange(20, 100, 10)
    found = analyze(LoadTrace(counts=counts, layer_ids=(0,)), MACHINE)
    assert found.persistence.tolist() == [0.0]
    assert found.foresight.planned > 1.2 > 1.05 > found.foresight.promised


def test_one_step_and_no_machine():
    trace = LoadTrace(counts=np.arange(1, 33).reshape(1, 1, 32), layer_ids=(5,))
    found = analyze(trace)
    assert found.persistence is None and found.foresight is None and found.ranks == {} and set(found.experts) == {"all steps"}
    with pytest.raises(ValueError, match="nothing was routed"):
        analyze(LoadTrace(counts=np.zeros((1, 1, 32), dtype=np.int64), layer_ids=(5,)))
