"""Made loads: exact sums, the published skew, and the statistics that the settings promise."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.moe.eplb.load.synth import draw, drifted, popularity, synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.metrics import balance, imbalance
from rorqual.moe.eplb.trace import PHASES


def ranks_of(counts, n_ranks=32):
    return counts.reshape(*counts.shape[:-1], n_ranks, -1).sum(-1)


def test_defaults_have_the_published_skew_of_deepseek_r1():
    """Published: rank CV 0.480 and excess 1.564, expert CV 1.282 and excess 10.95; each within 10% here, averaged over seeds."""
    traces = [synth(SynthConfig(n_steps=4, seed=seed)).counts for seed in range(8)]
    ranks = [balance(ranks_of(counts)) for counts in traces]
    experts = [balance(counts) for counts in traces]
    assert traces[0].sum() / traces[0].size == 128 and ranks_of(traces[0]).mean() == 1024
    assert np.mean([b.cv for b in ranks]) == pytest.approx(0.480, rel=0.10)
    assert np.mean([b.excess for b in ranks]) == pytest.approx(1.564, rel=0.10)
    assert np.mean([b.cv for b in experts]) == pytest.approx(1.282, rel=0.10)
    assert np.mean([b.excess for b in experts]) == pytest.approx(10.95, rel=0.10)
    layers = imbalance(ranks_of(np.stack(traces))).mean((0, 1)) - 1
    assert layers.min() < 1.2 and layers.max() > 2.0  # layers differ, as published (0.46 to 2.46)


def test_counts_sum_exactly_and_no_expert_has_more_than_all_tokens():
    config = SynthConfig(n_layers=3, n_experts=6, top_k=4, n_steps=20, tokens=50, decode_tokens=7, sigma=(2.5, 2.5), seed=1)
    trace = synth(config)
    assert (trace.counts.sum(-1) == trace.tokens[:, None] * 4).all()
    assert (trace.counts <= trace.tokens[:, None, None]).all() and (trace.counts == trace.tokens[:, None, None]).any()
    assert set(trace.tokens) == {50, 7} and (trace.tokens == np.where(trace.phase == PHASES.index("decode"), 7, 50)).all()
    assert trace.layer_ids == (3, 4, 5) and trace.top_k == 4


def test_every_token_chooses_every_expert_if_it_must():
    assert (draw(np.array([[0.97, 0.01, 0.01, 0.01]]), 9, 4, np.random.default_rng(0)) == 9).all()


def test_the_seed_decides():
    config = SynthConfig(n_layers=2, n_steps=3, seed=5)
    assert (synth(config).counts == synth(config).counts).all()
    assert (synth(config).counts != synth(SynthConfig(n_layers=2, n_steps=3, seed=6)).counts).any()


def log_shares(config):
    return np.log(np.maximum(synth(config).counts, 1))


def correlation(a, b):
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def test_domains_share_what_they_should():
    """Without noise the logs of two domains correlate by one minus the share that each has for itself."""
    config = SynthConfig(n_layers=20, n_steps=60, tokens=2_000_000, domains=("code", "chat"), domain_share=0.6, dwell=3, noise=0.0)
    logs, trace = log_shares(config), synth(config)
    domains = np.array(trace.domain)
    assert set(trace.domain) == {"code", "chat"}
    code, chat = logs[domains == "code"], logs[domains == "chat"]
    assert correlation(code[0], code[-1]) > 0.99
    assert correlation(code[0], chat[0]) == pytest.approx(0.4, abs=0.07)


def test_noise_follows_its_process():
    config = SynthConfig(n_layers=8, n_steps=60, tokens=5_000_000, noise=0.3, memory=0.7, sigma=(1.0, 1.0))
    logs = log_shares(config)
    changing = logs - logs.mean(0)
    assert changing.std() == pytest.approx(0.3, rel=0.1)
    assert correlation(changing[:-1], changing[1:]) == pytest.approx(0.7, abs=0.06)
    assert logs[0].std() == pytest.approx(1.0, rel=0.1)  # noise is part of sigma


def test_drift_moves_by_what_it_says_and_keeps_the_skew():
    config = SynthConfig(n_layers=4, n_steps=1001, tokens=500_000, noise=0.0, drift=0.3, sigma=(1.0, 1.0))
    logs = log_shares(config)
    assert (logs[1000] - logs[0]).std() == pytest.approx(0.3, rel=0.15)
    assert logs[1000].std() == pytest.approx(logs[0].std(), rel=0.1)


def test_drifted_keeps_rows_and_moves_by_its_amount():
    load = popularity(6, 256, seed=2) * 1000
    after = drifted(load, 0.05, seed=3)
    assert after.sum(1) == pytest.approx(load.sum(1))
    assert np.log(after / load).std() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 9, "n_experts": 8}, {"sigma": (1.0, 0.5)}, {"noise": 2.0}, {"domains": ()}, {"domains": ("a", "a")}, {"memory": 1.0},
        {"domain_share": 0.7, "phase_share": 0.6}, {"dwell": 0.5}, {"drift": -1.0}, {"decode_tokens": 0}, {"decode_share": 1.5},
    ],
)  # fmt: skip
def test_settings_that_make_no_load_are_refused(wrong):
    with pytest.raises(ValueError, match="synth"):
        SynthConfig(**wrong)
