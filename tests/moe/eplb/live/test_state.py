"""What belongs to an expert is declared as a whole, or is refused at the start."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rorqual.moe.config import MoEConfig
from rorqual.moe.eplb.live.config import LiveConfig
from rorqual.moe.eplb.live.digest import Digest
from rorqual.moe.eplb.live.layout import TRAILER_BYTES
from rorqual.moe.eplb.live.staging import Staging
from rorqual.moe.eplb.live.state import ExpertState, agree_layouts
from rorqual.moe.experts import Experts
from rorqual.moe.layer import MoE

CPU = torch.device("cpu")


def test_all_tensors_of_real_experts_move_with_their_scales() -> None:
    experts = Experts(3, 256, 128)
    experts.narrow()
    for tensor in (experts.gate_up, experts.down):
        tensor.data = torch.randint(0, 100, tensor.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for scale in (experts.gate_up_scale_inv, experts.down_scale_inv):
        scale.data.copy_(torch.randn(scale.shape))
    state = ExpertState.of_module(experts, n_slots=3, where="layer 3")
    assert [part.name for part in state.layout.parts] == ["down", "down_scale_inv", "gate_up", "gate_up_scale_inv"]
    assert state.layout.expert_bytes == sum(p[0].numel() * p.element_size() for p in experts.parameters())
    before = [view.clone() for view in state.views(1)]
    staging = Staging(state.layout, 1, CPU, digests=True)
    state.pack(1, staging.payload(0))
    state.unpack(staging.payload(0), 2)
    assert all(torch.equal(a, b) for a, b in zip(before, state.views(2), strict=True))
    assert LiveConfig(staging=1).memory_bytes(state.layout.payload_bytes) == staging.n_bytes


def test_the_layer_of_the_model_declares_only_experts() -> None:
    config = MoEConfig(hidden=8, intermediate=4, n_experts=4, top_k=2, n_group=1, topk_group=1, n_shared=1)
    layer = MoE(config, 0, n_slots=4, inner=4)
    assert set(ExpertState.of_module(layer.experts, n_slots=4, where="layer 0").tensors) == {"gate_up", "down"}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.zeros(3, 4).t()}, r"w \[4, 3\] with strides \[1, 4\] is not contiguous"),
        ({"w": torch.zeros(4, 8)[:, :4]}, "is not contiguous"),
        ({"w": torch.zeros(4, 4), "scale": torch.zeros(2, 8)}, r"scale \[2, 8\] does not lead with the 4 slots"),
        ({"w": torch.zeros(4, 4), "scale": torch.tensor(1.0)}, r"scale \[\] does not lead"),
        ({"w": torch.zeros(4, 0)}, "is empty"),
        ({}, "no tensor is declared"),
    ],
)
def test_tensors_that_cannot_be_moved_slot_by_slot(tensors: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=f"layer 5: .*{words}"):
        ExpertState(tensors, n_slots=4, where="layer 5")


def test_a_view_of_a_declared_tensor_is_not_declared_twice() -> None:
    whole = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="share memory"):
        ExpertState({"w": whole, "flat": whole.view(4, 2, 3)}, n_slots=4, where="layer 0")


class Swizzled(nn.Module):
    """Experts with a tensor that a kernel wants in an order without a leading slot dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, 2), requires_grad=False)
        self.caches = {"swizzled": self.w.permute(1, 0, 2).contiguous()}
        self.lut = torch.arange(7)

    def remake(self, slots: list[int]) -> None:
        self.caches["swizzled"][:, slots] = self.w.permute(1, 0, 2)[:, slots]


def test_a_derived_tensor_that_is_not_declared_fails_at_the_start() -> None:
    module = Swizzled()
    with pytest.raises(ValueError, match=r"caches.swizzled \[3, 4, 2\] does not lead .* or as derived"):
        ExpertState.of_module(module, n_slots=4, where="layer 1", shared=["lut"])
    with pytest.raises(ValueError, match=r"lut \[7\] does not lead"):
        ExpertState.of_module(module, n_slots=4, where="layer 1", derived={"caches.swizzled": module.remake})
    with pytest.raises(ValueError, match="no tensor is called scale"):
        ExpertState.of_module(module, n_slots=4, where="layer 1", shared=["scale"])
    state = ExpertState.of_module(module, n_slots=4, where="layer 1", shared=["lut"], derived={"caches.swizzled": module.remake})
    assert list(state.tensors) == ["w"] and len(state.derived) == 1
    module._packed = torch.zeros(8)
    with pytest.raises(ValueError, match=r"_packed \[8\] does not lead"):
        ExpertState.of_module(module, n_slots=4, where="layer 1", shared=["lut"], derived={"caches.swizzled": module.remake})


def test_layers_must_be_alike() -> None:
    one, two = (ExpertState({"w": torch.zeros(2, n)}, n_slots=2, where=f"layer {n}") for n in (3, 4))
    with pytest.raises(ValueError, match="experts of layer 4 .* are not made like those of layer 3"):
        agree_layouts([one, two])


def test_loaded_values_must_fit() -> None:
    state = ExpertState({"w": torch.zeros(2, 3), "s": torch.zeros(2)}, n_slots=2, where="layer 0")
    buffer = torch.zeros(state.layout.payload_bytes, dtype=torch.uint8)
    state.fill(buffer, {"w": torch.ones(3), "s": torch.tensor(2.0)})
    state.unpack(buffer, 1)
    assert state.tensors["w"][1].tolist() == [1, 1, 1] and state.tensors["s"].tolist() == [0, 2]
    with pytest.raises(ValueError, match="w must be float32.3., found float64.3."):
        state.fill(buffer, {"w": torch.ones(3).double(), "s": torch.tensor(2.0)})
    with pytest.raises(ValueError, match="an expert has s, w; found w"):
        state.fill(buffer, {"w": torch.ones(3)})


def digest(data: torch.Tensor) -> int:
    out = torch.zeros((), dtype=torch.int64)
    Digest(CPU).of(data, out)
    return int(out)


def test_digests_see_what_changed() -> None:
    rng = np.random.default_rng(0)
    data = torch.from_numpy(rng.integers(0, 256, 8 * 70_000, dtype=np.uint8))
    whole = digest(data)
    assert whole == digest(data.clone())
    seen = {whole}
    for place in [0, 7, 8, 8 * 65_536 - 1, 8 * 65_536, len(data) - 1, *rng.integers(0, len(data), 40).tolist()]:
        changed = data.clone()
        changed[place] ^= 1 << int(rng.integers(0, 8))
        seen.add(digest(changed))
    words = data.view(torch.int64)
    for a, b in rng.integers(0, len(words), (20, 2)).tolist():
        changed = data.clone()
        view = changed.view(torch.int64)
        if words[a] == words[b]:
            continue
        view[a], view[b] = words[b], words[a]  # exchanged words
        seen.add(digest(changed))
        changed = data.clone()
        changed.view(torch.int64)[[a, b]] ^= -(1 << 63)  # two signs
        seen.add(digest(changed))
    assert len(seen) == 1 + 46 + 40
    assert digest(torch.zeros(16, dtype=torch.uint8)) == digest(torch.zeros(64, dtype=torch.uint8)) == 0


def test_a_buffer_is_read_once() -> None:
    state = ExpertState({"w": torch.arange(6.0).view(2, 3)}, n_slots=2, where="layer 0")
    staging = Staging(state.layout, 2, CPU, digests=True)
    state.pack(1, staging.payload(staging.spare))
    staging.seal(staging.spare, 4, 7, good=True)
    staging.buffers[0].copy_(staging.buffers[staging.spare])
    found = staging.unseal(0)
    assert (found.layer, found.expert, found.good) == (4, 7, True) and found.digest
    with pytest.raises(ValueError, match="no expert arrived"):
        staging.unseal(0)
    staging.buffers[1].copy_(staging.buffers[staging.spare])
    staging.buffers[1, 2] ^= 1
    with pytest.raises(ValueError, match="expert 7 of MoE layer 4 arrived with checksum"):
        staging.unseal(1)
    assert staging.buffers.shape[1] == 16 + TRAILER_BYTES
