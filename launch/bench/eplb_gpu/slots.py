"""Experts that change places on a GPU, against the speed of a plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ....moe.eplb.permute_slots import SlotMover
from ..kernels.timing import event_us
from ..results import Row

#: share of the copy's speed that a permutation in place has to reach
WANTED = 0.7


def expert_state(n_slots: int, hidden: int, inner: int, device: torch.device) -> list[torch.Tensor]:
    """Weights and scales of FP8 experts, as ``moe.experts.Experts`` has them; bytes at random."""
    bytes_of = [(2, inner, hidden), (hidden, inner)]
    scales = [(2, -(-inner // 128), -(-hidden // 128)), (-(-hidden // 128), -(-inner // 128))]
    state = [torch.randint(0, 120, (n_slots, *shape), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn) for shape in bytes_of]
    return state + [torch.rand((n_slots, *shape), device=device) for shape in scales]


def sources(n_slots: int, seed: int = 0) -> dict[str, list[int]]:
    """Permutations: one cycle through all slots, cycles of two, and one at random."""
    swaps = [slot ^ 1 if (slot ^ 1) < n_slots else slot for slot in range(n_slots)]
    random = torch.randperm(n_slots, generator=torch.Generator().manual_seed(seed)).tolist()
    return {"one cycle": [(slot + 1) % n_slots for slot in range(n_slots)], "swaps": swaps, "random": random}


def copy_gb_per_s(n_bytes: int) -> float:
    """Bytes read and written a second by a copy of ``n_bytes`` between two places, 10**9."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2e-3 * n_bytes / event_us(lambda: target.copy_(source))


def slot_rows(counts: list[int], hidden: int, inner: int) -> Iterator[Row]:
    """GB/s (read and written) of permutations of so many slots each, in registers, and through one spare expert beside it."""
    for n_slots in counts:
        state = expert_state(n_slots, hidden, inner, torch.device("cuda"))
        quick, plain = SlotMover(state, backend="triton"), SlotMover(state, backend="torch")
        copy = copy_gb_per_s(quick.bytes_of_expert * n_slots)
        for name, source in sources(n_slots).items():
            moved = sum(at != slot for slot, at in enumerate(source))
            work = 2e-3 * moved * quick.bytes_of_expert
            rate = {mover: work / event_us(partial(mover.move, source)) for mover in (quick, plain)}
            yield Row(
                name=f"slots permuted in place, {name}", params={"slots": n_slots, "expert_mb": round(quick.bytes_of_expert / 1e6, 2)},
                value=rate[quick], unit="GB/s", better="higher", roof=rate[quick] / copy,
                peers={"one spare expert": rate[plain], "copy": copy}, target=WANTED * copy,
            )  # fmt: skip
