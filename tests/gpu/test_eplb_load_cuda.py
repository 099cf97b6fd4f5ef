"""Recording on CUDA: counts of captured steps are exact, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch

from rorqual.moe.eplb.load.recorder import LoadRecorder
from rorqual.moe.kernels import router_torch
from rorqual.moe.load import ExpertLoad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
E, K, ROWS, LAYERS = 256, 8, 64, (1, 2)
RULES = {
    "n_group": 8, "topk_group": 4, "top_k": K, "scoring": "sigmoid", "method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def test_replayed_steps_are_recorded_without_waiting():
    from rorqual.moe.kernels import router

    load, twin = ExpertLoad(3, E, "cuda"), ExpertLoad(3, E)
    recorder = LoadRecorder(load, layer_ids=LAYERS, top_k=K, window=2, mode="stat")
    expected = LoadRecorder(twin, layer_ids=LAYERS, top_k=K, window=2, mode="stat")
    logits, bias = torch.randn(ROWS, E, device="cuda"), torch.zeros(E, device="cuda")
    n_valid = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step() -> None:
        for layer in LAYERS:
            router.route(logits * layer, bias, counts=load.counts[layer], n_valid=n_valid, **RULES)

    step()  # compiles; no row is valid
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, tokens in enumerate((ROWS, 0, 17, 1)):
        logits.copy_(torch.randn(ROWS, E, generator=torch.Generator().manual_seed(number)))
        n_valid.fill_(tokens)
        rows = logits.cpu()
        for layer in LAYERS:
            router_torch.route(
                rows * layer, bias.cpu(), counts=twin.counts[layer], n_valid=torch.tensor([tokens], dtype=torch.int32), **RULES
            )
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            recorder.after_step(number, tokens=tokens)
            window = recorder.window()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected.after_step(number, tokens=tokens)
        assert (window.cpu() == expected.window()).all()
    found = recorder.trace()
    assert (found.counts == expected.trace().counts).all()
    assert (found.counts.sum(2) == found.tokens[:, None] * K).all()
