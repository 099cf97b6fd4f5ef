"""Windows, means that forget, parts by phase and domain, and what a trace says about balancing."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.moe.eplb.load.diagnosis import diagnose
from rorqual.moe.eplb.load.ewma import Ewma, ewma
from rorqual.moe.eplb.load.persistence import persistence
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.load.views import busy, by_domain, by_phase, windows
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace

SMALL = {"n_layers": 3, "n_experts": 32, "top_k": 4, "tokens": 500}


def test_phases_and_domains_part_the_steps():
    trace = synth(SynthConfig(**SMALL, n_steps=40, decode_tokens=50, decode_share=0.5, domains=("a", "b"), dwell=4))
    for parts in (by_phase(trace), by_domain(trace)):
        assert len(parts) == 2 and sum(part.n_steps for part in parts.values()) == 40
        assert (sum(part.total for part in parts.values()) == trace.total).all()
    assert set(by_phase(trace)["decode"].tokens) == {50}
    with pytest.raises(ValueError, match="phase"):
        by_phase(LoadTrace(counts=trace.counts, layer_ids=trace.layer_ids))
    with pytest.raises(ValueError, match="domain"):
        by_domain(LoadTrace(counts=trace.counts, layer_ids=trace.layer_ids))


def test_windows_are_sums():
    trace = synth(SynthConfig(**SMALL, n_steps=10))
    found = windows(trace, 4, 3)
    assert len(found) == 3 and all((found[i] == trace.counts[3 * i : 3 * i + 4].sum(0)).all() for i in range(3))
    assert len(windows(trace, 4)) == 2
    for size, stride in [(0, 1), (11, 1), (2, 0)]:
        with pytest.raises(ValueError, match="windows of"):
            windows(trace, size, stride)


def test_ewma_is_the_weighted_mean():
    trace = synth(SynthConfig(**SMALL, n_steps=12))
    weights = 0.5 ** (np.arange(11, -1, -1) / 3.0)
    assert ewma(trace, 3.0) == pytest.approx(np.einsum("s,sle->le", weights, trace.counts) / weights.sum())


def test_ewma_of_sums_is_that_of_even_steps():
    one, many = Ewma(5.0), Ewma(5.0)
    for counts in ([[8.0, 4.0]], [[4.0, 0.0]]):
        one.add(counts, steps=4)
        for _ in range(4):
            many.add(np.array(counts) / 4)
    assert one.value == pytest.approx(many.value)
    with pytest.raises(ValueError, match="half life"):
        Ewma(0.0)
    with pytest.raises(ValueError, match="no counts"):
        _ = Ewma(1.0).value
    with pytest.raises(ValueError, match="so far"):
        one.add([[1.0]])


def test_idle_steps_are_left_out():
    trace = synth(SynthConfig(**SMALL, n_steps=4))
    trace.counts[1] = 0
    assert busy(trace).n_steps == 3
    found = diagnose(trace, Topology.even(n_slots=32, n_ranks=4))
    assert (found.steps, found.idle_steps) == (3, 1)


def test_hot_experts_that_last_are_told_from_those_that_change():
    stable = persistence(synth(SynthConfig(**SMALL, n_steps=64, noise=0.05)))
    assert stable.mean_overlap.min() > 0.85 and stable.correlation.min() > 0.9 and stable.chance == 4 / 32
    rng = np.random.default_rng(0)
    changing = LoadTrace(counts=rng.multinomial(4000, rng.dirichlet(np.ones(32), (64, 3))), layer_ids=(0, 1, 2))
    found = persistence(changing, window=1)
    assert abs(found.mean_overlap - found.chance).max() < 0.06 and abs(found.correlation.mean(1)).max() < 0.06
    with pytest.raises(ValueError, match="needs two or more"):
        persistence(changing.select(np.arange(1)))


def test_chance_is_told_from_imbalance():
    """Few tokens make ranks differ whatever the router does: no reason to balance."""
    rng = np.random.default_rng(0)
    even = LoadTrace(counts=rng.multinomial(256, np.full(32, 1 / 32), (30, 3)), layer_ids=(3, 4, 5))
    found = diagnose(even, Topology.even(n_slots=32, n_ranks=8))
    assert found.ranks.imbalance > 1.1 and found.chance == pytest.approx(found.ranks.imbalance, rel=0.03)
    assert any("chance" in line and "cannot help" in line for line in found.verdict)


def test_an_expert_above_a_ranks_load_needs_replicas():
    trace = synth(SynthConfig(**SMALL | {"tokens": 4000}, n_steps=16, sigma=(1.2, 1.2)))
    trace.counts[:, 1, 7] = trace.counts[:, 1].sum(1)
    topology = Topology.even(n_slots=32, n_ranks=8)
    found = diagnose(trace, topology)
    assert found.needs_replicas[1] == 1 and any("need replicas" in line for line in found.verdict)
    identity = np.tile(np.arange(32), (3, 1))
    loads = np.stack([rank_loads(identity, counts.astype(float), topology) for counts in trace.counts])
    assert found.ranks.imbalance == pytest.approx((loads.max(2) / loads.mean(2)).mean())
    assert any("they last" in line for line in found.verdict)


def test_experts_hot_in_turns_are_not_cured_by_a_placement():
    counts = np.full((32, 1, 32), 10)
    counts[np.arange(32), 0, np.arange(32)] = 300
    found = diagnose(LoadTrace(counts=counts, layer_ids=(0,)), Topology.even(n_slots=32, n_ranks=8))
    assert found.total.imbalance == 1.0 and any("in turns" in line for line in found.verdict)


def test_a_placement_that_does_not_fit_is_refused():
    trace = synth(SynthConfig(**SMALL, n_steps=4))
    with pytest.raises(ValueError, match="36 slots and 32 experts"):
        diagnose(trace, Topology.even(n_slots=36, n_ranks=4))
    trace.counts[:] = 0
    with pytest.raises(ValueError, match="none of the 4 steps"):
        diagnose(trace, Topology.even(n_slots=32, n_ranks=4))
