"""The router kernel in the interpreter against the plain PyTorch version and the module, and what it compiles to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.moe.config import MoEConfig  # noqa: E402
from rorqual.moe.kernels import router, router_torch  # noqa: E402
from rorqual.moe.router import Router  # noqa: E402
from rorqual.moe.ways import way_of_rows  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports  # noqa: E402

repair()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")

V3 = {"n_group": 8, "topk_group": 4, "top_k": 8, "scoring": "sigmoid", "method": "noaux_tc"}
SETTINGS = [
    (32, {**V3, "topk_group": 2, "top_k": 4}),
    (40, {"n_group": 8, "topk_group": 3, "top_k": 6, "scoring": "softmax", "method": "group_limited_greedy"}),  # groups of 5
    (24, {"n_group": 3, "topk_group": 2, "top_k": 3, "scoring": "sigmoid", "method": "noaux_tc"}),
    (20, {"n_group": 1, "topk_group": 1, "top_k": 6, "scoring": "softmax", "method": "greedy"}),
    (9, {"n_group": 1, "topk_group": 1, "top_k": 9, "scoring": "sigmoid", "method": "noaux_tc"}),
]
REST = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
ONE = {"tokens": 4, "warps": 1}


def same(got, wanted):
    for name, a, b in zip(("ids", "weights", "slots"), got, wanted, strict=True):
        assert a.dtype == b.dtype, name
        torch.testing.assert_close(
            a, b, rtol=2e-6, atol=0 if name != "weights" else 1e-30, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def ties(tokens: int, experts: int) -> torch.Tensor:
    return torch.tensor([0.0, -0.0, 1.0, 1.0, -2.0])[torch.randint(5, (tokens, experts))]


@interpreted
@pytest.mark.parametrize(("experts", "settings"), SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("ways", [None, 5])
def test_equals_the_plain_version(experts, settings, tied, norm, ways):
    torch.manual_seed(experts)
    logits = ties(11, experts) if tied else torch.randn(11, experts)
    bias = torch.randint(-2, 2, (experts,)).float() if tied else torch.randn(experts) - 1.0
    mapping = torch.randperm(experts * (ways or 1)).to(torch.int32 if norm else torch.int64)
    mapping = mapping if ways is None else mapping.view(experts, ways)
    rest = {
        "norm_topk_prob": norm,
        "routed_scaling_factor": 1.5,
        "expert_to_slot": mapping,
        "n_valid": torch.tensor([9], dtype=torch.int32),
    }
    counts = [torch.arange(experts), torch.arange(experts)]
    got = router.route(logits, bias, **settings, **rest, counts=counts[0], config=ONE)
    wanted = router_torch.route(logits, bias, **settings, **rest, counts=counts[1])
    same(got, wanted)
    assert torch.equal(*counts)
    if ways is not None:
        way = way_of_rows(9, ways, "cpu")
        assert got[2][:9].tolist() == [[mapping[e, way[t]].item() for e in row] for t, row in enumerate(got[0][:9].tolist())]
        assert len(set(way.tolist())) == ways
    assert (got[0][9:] == -1).all() and (got[2][9:] == -1).all() and not got[1][9:].any()


@interpreted
@pytest.mark.parametrize(("experts", "settings"), SETTINGS)
def test_the_plain_version_equals_the_module(experts, settings):
    torch.manual_seed(experts + 1)
    module = Router(MoEConfig(hidden=16, intermediate=4, n_experts=experts, **settings, **REST))
    module.weight.normal_()
    bias = getattr(module, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_()
    x = torch.randn(7, 16)
    ids, weights = module(x)
    for room in (router, router_torch):
        got = room.route(x @ module.weight.T, bias, **settings, **REST)
        assert torch.equal(got[0].long(), ids)
        assert torch.equal(got[2], got[0])
        torch.testing.assert_close(got[1], weights, rtol=1e-5, atol=1e-7)


@interpreted
def test_broken_logits_are_chosen_first_as_torch_sorts_them():
    torch.manual_seed(3)
    logits = torch.randn(6, 32)
    logits[torch.rand(6, 32) < 0.1] = float("nan")
    logits[0, 3], logits[1, 4] = float("inf"), float("-inf")
    settings = {**V3, "topk_group": 2, "top_k": 4}
    bias = torch.zeros(32)
    got = router.route(logits, bias, **settings, **REST, config=ONE)
    wanted = router_torch.route(logits, bias, **settings, **REST)
    assert torch.equal(got[0], wanted[0])


@interpreted
def test_no_tokens_and_no_valid_tokens():
    empty = router.route(torch.zeros(0, 32), torch.zeros(32), **{**V3, "top_k": 2}, **REST)
    assert [tuple(t.shape) for t in empty] == [(0, 2)] * 3
    counts = torch.zeros(32, dtype=torch.int64)
    none = torch.zeros(1, dtype=torch.int32)
    ids, weights, slots = router.route(
        torch.full((3, 32), float("nan")), torch.zeros(32), **{**V3, "top_k": 3}, **REST, counts=counts, n_valid=none, config=ONE
    )
    assert (ids == -1).all() and (slots == -1).all() and not weights.any() and not counts.any()


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="bias"):
        router.route(torch.zeros(1, 32), None, **V3, **REST)
    with pytest.raises(ValueError, match="fp32"):
        router.route(torch.zeros(1, 32).half(), torch.zeros(32), **V3, **REST)
    with pytest.raises(ValueError, match="512"):
        router.route(torch.zeros(1, 1024), torch.zeros(1024), **V3, **REST)
    with pytest.raises(ValueError, match=r"must be contiguous, \[32\] or \[32, ways\]"):
        router.route(torch.zeros(1, 32), torch.zeros(32), **V3, **REST, expert_to_slot=torch.zeros(4, 32, dtype=torch.int32).T)


def test_compiles_without_spills():
    signature = {"logits": "*fp32", "logits_stride": "i32", "bias": "*fp32", "expert_to_slot": "*i32", "counts": "*i64", "n_valid": "*i32"}
    signature |= {"ids": "*i32", "weights": "*fp32", "slots": "*i32", "n_tokens": "i32", "factor": "fp32"}
    fixed = {"GROUPS": 8, "PADDED": 8, "KEPT": 4, "SIGMOID": True, "TWO_BEST": True, "NORM": True, "LIBDEVICE": True, "K": 8}
    specs = [
        Spec(
            fn="rorqual.moe.kernels.router:route_kernel",
            signature=signature,
            constexprs={**fixed, "E": experts, "TOKENS": 1, "WAYS": ways, "EARLY": True},
            aligned=tuple(n for n in signature if n not in ("n_tokens", "factor")),
            options={"num_warps": 1},
        )
        for experts, ways in ((256, 1), (512, 1), (512, 64))
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0
        assert report.shared <= SMEM_LIMIT
        assert report.registers <= 168
