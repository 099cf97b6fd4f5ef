"""The router kernel on a GPU against the plain PyTorch version."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.moe.kernels import router, router_torch  # noqa: E402

DEVICE = torch.device("cuda")
V3 = {"n_group": 8, "topk_group": 4, "top_k": 8, "scoring": "sigmoid", "method": "noaux_tc"}
SETTINGS = {
    "V3": (256, V3),
    "one group": (384, {**V3, "n_group": 1, "topk_group": 1}),
    "V2": (160, {"n_group": 8, "topk_group": 3, "top_k": 6, "scoring": "softmax", "method": "group_limited_greedy"}),
    "V2 Lite": (64, {"n_group": 1, "topk_group": 1, "top_k": 6, "scoring": "softmax", "method": "greedy"}),
    "512": (512, {**V3, "top_k": 10}),
}
REST = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ways", [1, 64])
def test_equals_the_plain_version(name, tied, ways):
    experts, settings = SETTINGS[name]
    generator = torch.Generator(device=DEVICE).manual_seed(experts)
    logits = torch.randn(1111, experts, device=DEVICE, generator=generator)
    logits = logits.round() if tied else logits
    bias = torch.randn(experts, device=DEVICE, generator=generator) * (0.0 if tied else 0.2)
    mapping = torch.randperm(experts * ways, device=DEVICE, generator=generator).int().view(experts, ways)
    counts = [torch.full((experts,), 5, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    n_valid = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    if settings["scoring"] == "softmax" and not tied:
        # Sums of exponentials are rounded differently; choices are compared where no two scores are that close.
        wanted = router_torch.route(logits.double(), bias, **settings, **REST, expert_to_slot=mapping, counts=counts[1], n_valid=n_valid)
    else:
        wanted = router_torch.route(logits, bias, **settings, **REST, expert_to_slot=mapping, counts=counts[1], n_valid=n_valid)
    got = router.route(logits, bias, **settings, **REST, expert_to_slot=mapping, counts=counts[0], n_valid=n_valid)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[2], wanted[2])
    assert torch.equal(*counts)
    torch.testing.assert_close(got[1], wanted[1].float(), rtol=1e-5, atol=1e-7)


def test_broken_logits():
    logits = torch.randn(500, 256, device=DEVICE)
    logits[torch.rand(500, 256, device=DEVICE) < 0.02] = float("nan")
    logits[torch.rand(500, 256, device=DEVICE) < 0.02] = float("inf")
    logits[torch.rand(500, 256, device=DEVICE) < 0.02] = float("-inf")
    bias = torch.zeros(256, device=DEVICE)
    assert torch.equal(router.route(logits, bias, **V3, **REST)[0], router_torch.route(logits, bias, **V3, **REST)[0])


def test_replays_of_a_graph_are_equal_and_overwrite_everything():
    logits, bias = torch.randn(700, 256, device=DEVICE), torch.randn(256, device=DEVICE)
    counts, n_valid = torch.zeros(256, dtype=torch.int64, device=DEVICE), torch.tensor([700], dtype=torch.int32, device=DEVICE)
    router.route(logits, bias, **V3, **REST, counts=counts, n_valid=n_valid)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = router.route(logits, bias, **V3, **REST, counts=counts, n_valid=n_valid)
    for valid in (700, 1, 0, 333):
        n_valid.fill_(valid)
        counts.zero_()
        sums = torch.zeros_like(counts)
        wanted = router_torch.route(logits, bias, **V3, **REST, counts=sums, n_valid=n_valid)
        first = None
        for repeat in range(25):
            for tensor in out:
                tensor.fill_(77)
            graph.replay()
            first = first or [tensor.clone() for tensor in out]
            assert all(torch.equal(a, b) for a, b in zip(out, first, strict=True))
            assert torch.equal(counts, sums * (repeat + 1))
        assert torch.equal(out[0], wanted[0])
        assert torch.equal(out[2], wanted[2])
        torch.testing.assert_close(out[1], wanted[1], rtol=1e-5, atol=1e-7)


def test_logits_at_a_stride_past_2_to_the_31():
    stride = 1 << 28
    buffer = torch.empty(9 * stride + 256, device=DEVICE)
    logits = buffer.as_strided((10, 256), (stride, 1))
    logits.copy_(torch.randn(10, 256, device=DEVICE))
    bias = torch.zeros(256, device=DEVICE)
    assert torch.equal(router.route(logits, bias, **V3, **REST)[0], router_torch.route(logits.contiguous(), bias, **V3, **REST)[0])
