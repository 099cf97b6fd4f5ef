"""The fused path of the expert layer, run by the kernels' plain twins, against the torch path."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.local import LocalDispatcher
from rorqual.engine.weights.fp8 import quantise_block_fp8
from rorqual.moe.config import MoEConfig
from rorqual.moe.exchange import ExpertExchange
from rorqual.moe.layer import MoE
from rorqual.moe.load import ExpertLoad
from rorqual.moe.ops import MoEOps
from rorqual.moe.placement import Placement
from rorqual.parallel.group import Group

CONFIG = MoEConfig(hidden=64, intermediate=48, n_experts=8, top_k=3, n_group=4, topk_group=2, n_shared=1, routed_scaling_factor=2.5)


def layer(config: MoEConfig, *, fused: bool, payload: str = "native", seed: int = 0) -> MoE:
    """Slots hold the experts in reverse order, so that ids and slots differ."""
    module = MoE(config, 0, n_slots=config.n_experts, inner=config.intermediate)
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator) * param.shape[-1] ** -0.5
    reverse = torch.arange(config.n_experts).flip(0)[None]
    placement = Placement(slot_to_expert=reverse, n_experts=config.n_experts, n_ranks=1)
    spec = EPSpec(n_ranks=1, n_slots=config.n_experts, hidden=config.hidden, top_k=config.top_k, max_tokens=512, payload=payload)
    load = ExpertLoad(1, config.n_experts)
    module.attach(ExpertExchange(dispatcher=LocalDispatcher(spec), tp=Group.solo("tp"), placement=placement, load=load, spread=False))
    if fused:
        module.exchange.ops = MoEOps.load("torch")
        if module.shared_experts is not None:
            module.shared_experts.fuse()
    return module


@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("payload", ["native", "fp8"])
def test_fused_equals_the_torch_path(tokens, payload):
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3))
    plain, fused = layer(CONFIG, fused=False, payload=payload), layer(CONFIG, fused=True, payload=payload)
    torch.testing.assert_close(fused(x), plain(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(fused.exchange.load.counts, plain.exchange.load.counts)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_other_choice_rules(method):
    config = dataclasses.replace(CONFIG, method=method, scoring="softmax", norm_topk_prob=False)
    x = torch.randn(20, 64)
    torch.testing.assert_close(layer(config, fused=True)(x), layer(config, fused=False)(x), atol=1e-5, rtol=1e-5)


def test_padding_meets_no_expert_and_is_not_counted():
    fused, x = layer(CONFIG, fused=True), torch.randn(6, 64)
    alone = fused(x[:4])
    before = fused.exchange.load.counts.clone()
    padded = fused(x, torch.tensor([4], dtype=torch.int32))
    torch.testing.assert_close(padded[:4], alone)
    assert torch.equal(fused.exchange.load.counts, 2 * before)
    shared = fused.shared_experts(x[4:])
    torch.testing.assert_close(padded[4:], shared)


def test_fp8_experts_are_near_the_dequantised_ones():
    config = dataclasses.replace(CONFIG, hidden=256, intermediate=128, n_shared=0)
    wide, narrow = layer(config, fused=False), layer(config, fused=True)
    narrow.experts.narrow()
    for slot in range(config.n_experts):
        for part in range(2):
            source = wide.experts.gate_up.data[slot, part]
            values, scale = quantise_block_fp8(source)
            narrow.experts.gate_up.data[slot, part], narrow.experts.gate_up_scale_inv.data[slot, part] = values, scale
            source.copy_(values.float() * scale.repeat_interleave(128, 0)[:128].repeat_interleave(128, 1))
        source = wide.experts.down.data[slot]
        values, scale = quantise_block_fp8(source)
        narrow.experts.down.data[slot], narrow.experts.down_scale_inv.data[slot] = values, scale
        source.copy_(values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1))
    x = torch.randn(40, 256)
    expected, got = wide(x), narrow(x)
    assert float((got - expected).norm() / expected.norm()) < 0.05  # activations rounded to e4m3 twice
    narrow.exchange.ops = None
    assert float((narrow(x) - expected).norm() / expected.norm()) < 0.05


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here: tests/gpu")
def test_the_triton_kernels_in_the_interpreter_equal_the_torch_path():
    pytest.importorskip("triton")
    from tests.kernels.interpreter import repair

    repair()
    x = torch.randn(13, 64, generator=torch.Generator().manual_seed(3))
    plain, fused = layer(CONFIG, fused=False), layer(CONFIG, fused=True)
    fused.exchange.ops = MoEOps.load("triton")
    torch.testing.assert_close(fused(x), plain(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(fused.exchange.load.counts, plain.exchange.load.counts)
