"""Router, placement, experts and load counts against slow twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.local import LocalDispatcher
from rorqual.moe.config import MoEConfig
from rorqual.moe.exchange import ExpertExchange
from rorqual.moe.experts import grouped_swiglu
from rorqual.moe.layer import MoE
from rorqual.moe.load import ExpertLoad
from rorqual.moe.placement import Placement
from rorqual.moe.router import Router, stable_topk
from rorqual.parallel.group import Group


def config(**changes) -> MoEConfig:
    base = {"hidden": 8, "intermediate": 6, "n_experts": 8, "top_k": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    return MoEConfig(**{**base, **changes})


def router(cfg: MoEConfig, seed: int = 0) -> Router:
    module = Router(cfg)
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return module


def slow_choice(cfg: MoEConfig, scores: list[float], bias: list[float]) -> list[int]:
    """Experts of one token, by the definition, one comparison at a time."""
    values = [s + b for s, b in zip(scores, bias, strict=True)] if cfg.method == "noaux_tc" else list(scores)
    if cfg.method != "greedy":
        size = cfg.n_experts // cfg.n_group
        blocks = [sorted(values[g * size : (g + 1) * size], reverse=True) for g in range(cfg.n_group)]
        rank = [sum(b[:2]) if cfg.method == "noaux_tc" else b[0] for b in blocks]
        kept = sorted(range(cfg.n_group), key=lambda g: (-rank[g], g))[: cfg.topk_group]
        out = float("-inf") if cfg.method == "noaux_tc" else 0.0
        values = [v if e // size in kept else out for e, v in enumerate(values)]
    return sorted(sorted(range(cfg.n_experts), key=lambda e: (-values[e], e))[: cfg.top_k])


@pytest.mark.parametrize("method", ["noaux_tc", "greedy", "group_limited_greedy"])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_router_chooses_by_the_definition(method, scoring):
    cfg = config(method=method, scoring=scoring)
    module = router(cfg)
    x = torch.randn(50, cfg.hidden, generator=torch.Generator().manual_seed(1))
    ids, weights = module(x)
    logits = x @ module.weight.t()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    bias = module.e_score_correction_bias if method == "noaux_tc" else torch.zeros(cfg.n_experts)
    for t in range(len(x)):
        chosen = slow_choice(cfg, scores[t].tolist(), bias.tolist())
        assert ids[t].tolist() == chosen
        expected = scores[t, chosen] / scores[t, chosen].sum() * 2.5
        torch.testing.assert_close(weights[t], expected)


def test_masked_groups_stay_out_when_biased_scores_are_negative():
    cfg = config(top_k=4)
    module = router(cfg)
    module.e_score_correction_bias.data = torch.full((8,), -5.0)
    module.weight.data.zero_()
    ids, _ = module(torch.randn(3, 8))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3  # groups 0 and 1 win the ties, with -4.5 each


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=7, max_size=7), min_size=1, max_size=6), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_ties_go_to_the_lowest_id(rows, k):
    found = stable_topk(torch.tensor(rows), k).tolist()
    assert found == [sorted(range(7), key=lambda i: (-row[i], i))[:k] for row in rows]


def test_router_without_tokens():
    ids, weights = router(config())(torch.zeros(0, 8))
    assert ids.shape == (0, 3) and weights.shape == (0, 3)


def test_grouped_swiglu_matches_one_expert_at_a_time_with_empty_slots():
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(5, 2, 6, 8, generator=generator), torch.randn(5, 8, 6, generator=generator)
    counts = torch.tensor([0, 3, 0, 1, 4])
    x = torch.randn(8, 8, generator=generator)
    y = grouped_swiglu(x, counts, gate_up, down)
    slots = torch.repeat_interleave(torch.arange(5), counts)
    for row, slot in enumerate(slots.tolist()):
        hidden = torch.nn.functional.silu(gate_up[slot, 0] @ x[row]) * (gate_up[slot, 1] @ x[row])
        torch.testing.assert_close(y[row], down[slot] @ hidden)
    assert grouped_swiglu(x[:0], torch.zeros(5, dtype=torch.int64), gate_up, down).shape == (0, 8)


def test_load_counts_skip_padding():
    load = ExpertLoad(2, 4)
    load.add(1, torch.tensor([[0, 3], [-1, -1], [3, 2]]))
    load.add(1, torch.zeros(0, 2, dtype=torch.int64))
    assert load.counts.tolist() == [[0, 0, 0, 0], [1, 0, 1, 2]]
    load.reset()
    assert load.counts.sum() == 0


def test_identity_placement_and_its_refusal():
    placement = Placement.identity(n_layers=2, n_experts=8, n_ranks=4)
    assert placement.local_experts(1, 3) == [6, 7]
    assert placement.first_slots().tolist() == [list(range(8))] * 2
    with pytest.raises(ValueError, match=r"8 routed experts do not divide over 3 .* valid sizes: \[1, 2, 4, 8\]"):
        Placement.identity(n_layers=1, n_experts=8, n_ranks=3)


def test_placement_with_a_missing_expert_is_refused():
    with pytest.raises(ValueError, match="layer 0 has no slot for expert 1"):
        Placement(slot_to_expert=torch.tensor([[0, 2, 2, 0]]), n_experts=3, n_ranks=2).first_slots()


@pytest.mark.parametrize("shuffle", [False, True])
def test_layer_equals_dense_sum_wherever_the_experts_live(shuffle):
    """Moving experts to other slots (and replicating one) changes bytes and a table, never the result."""
    cfg = config(n_shared=1)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4, 5, 0]) if shuffle else torch.arange(8)
    placement = Placement(slot_to_expert=order[None], n_experts=8, n_ranks=1)
    layer = MoE(cfg, 0, n_slots=len(order), inner=cfg.intermediate)
    generator = torch.Generator().manual_seed(2)
    full = {"gate_up": torch.randn(8, 2, 6, 8, generator=generator), "down": torch.randn(8, 8, 6, generator=generator)}
    layer.gate = router(cfg, 3)
    for param in layer.shared_experts.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    layer.experts.gate_up.data, layer.experts.down.data = full["gate_up"][order], full["down"][order]
    spec = EPSpec(n_ranks=1, n_slots=len(order), hidden=8, top_k=3, max_tokens=64, deterministic=True)
    load = ExpertLoad(1, 8)
    layer.attach(ExpertExchange(dispatcher=LocalDispatcher(spec), tp=Group.solo(), placement=placement, load=load, spread=True))
    x = torch.randn(20, 8, generator=generator)
    with torch.no_grad():
        out = layer(x)
        ids, weights = layer.gate(x)
        expected = layer.shared_experts(x)
        for t in range(20):
            for e, w in zip(ids[t].tolist(), weights[t], strict=True):
                hidden = torch.nn.functional.silu(full["gate_up"][e, 0] @ x[t]) * (full["gate_up"][e, 1] @ x[t])
                expected[t] += w * (full["down"][e] @ hidden)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert load.counts[0].tolist() == torch.bincount(ids.flatten(), minlength=8).tolist()
