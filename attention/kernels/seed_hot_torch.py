"""What ``seed_hot.seed_hot`` computes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kv.tier import NOWHERE


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Copies that fill a hot buffer; ``fetch_rows`` takes them as it takes those of ``Resolved``."""

    source: torch.Tensor  # int32 [1, B], >= 0: row of the host pool; <= -2: device row -(source + 2); undefined from count on
    target: torch.Tensor  # int32 [1, B], device row that the copy goes to; undefined from count on
    count: torch.Tensor  # int32 [1]


def seed_hot(
    positions: torch.Tensor,
    slot: int,
    latent_table_row: torch.Tensor,
    host_table_row: torch.Tensor,
    hot_pages: torch.Tensor,
    hot_positions: torch.Tensor,
    hot_stamps: torch.Tensor,
    stamp: torch.Tensor,
    scratch: torch.Tensor,
    *,
    page_size: int,
    seed_resident: bool = True,
) -> Seeds:
    """Fill a slot's hot buffer with what the last tokens of its request chose, the newest token's choice first, until it is full.

    What the buffer held before is forgotten. The n-th position seeded takes the n-th leased hot row. Its stamp is that of this
    step less the age of the youngest token that chose it (0 for the last row), but at least 0, so that old choices give way first.

    Args:
        positions: int32 [W, k], what the last W tokens of one request chose, oldest token first; -1 for none, anywhere.
        slot: the request's row of the hot tables, an int or an int64 tensor of one element.
        latent_table_row: int32 [P], device page of each page of the request, -1 absent.
        host_table_row: int32 [P], host page, -1 for one without a finished copy.
        hot_pages: int32 [S + 1, H], device pages leased to a slot, -1 none.
        hot_positions: int32 [S + 1, H * page_size]. Row ``slot`` is written.
        hot_stamps: int32 [S + 1, H * page_size]. Row ``slot`` is written where a position is seeded.
        stamp: int32 [1], number of this step.
        scratch: int32 [>= 1, >= P * page_size], any content.
        page_size: rows a page.
        seed_resident: seed positions whose page is on the device too (for pages that will be dropped), from there.

    Positions in no page on the device and in no finished host page are passed over.
    """
    where = int(slot)
    leased = (hot_pages[where].repeat_interleave(page_size) >= 0).nonzero()[:, 0]
    hot_positions[where] = NOWHERE
    seeds: dict[int, tuple[int, int]] = {}  # position -> age of the choice, source
    devices, hosts = latent_table_row.tolist(), host_table_row.tolist()
    for age, chosen in enumerate(reversed(positions.tolist())):
        for p in chosen:
            if p < 0 or p in seeds or len(seeds) == len(leased):
                continue
            page, offset = divmod(p, page_size)
            if devices[page] >= 0:
                if seed_resident:
                    seeds[p] = age, -(devices[page] * page_size + offset) - 2
            elif hosts[page] >= 0:
                seeds[p] = age, hosts[page] * page_size + offset
    n, hot = len(seeds), leased[: len(seeds)]

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=positions.device)

    hot_positions[where, hot] = ints(list(seeds))
    hot_stamps[where, hot] = (stamp - ints([age for age, _ in seeds.values()])).clamp(min=0)
    source, target = (hot_positions.new_full((1, hot_positions.shape[1]), NOWHERE) for _ in range(2))
    source[0, :n] = ints([at for _, at in seeds.values()])
    target[0, :n] = hot_pages[where, hot // page_size] * page_size + (hot % page_size).int()
    return Seeds(source=source, target=target, count=ints([n]))
