"""What each expert-parallel rank has to compute for some tokens and a placement: its rows and their slots, as dispatch would bring them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ....moe.eplb.choice.deal import deal_ways
from ....moe.eplb.plan import Floats
from ....moe.eplb.topology import Ints, Topology
from ....moe.ways import way_of_rows


@dataclass(frozen=True, kw_only=True)
class RankList:
    """Rows of one rank for one layer."""

    slots: torch.Tensor  # int32 [rows, k] slots of this rank from 0, -1 where a choice is another rank's
    n_tokens: int  # choices that are this rank's
    activated: int  # its slots that get a token


def choose_slots(
    ids: Ints, slot_to_expert: Ints, n_experts: int, topology: Topology, *, n_ways: int = 64, shares: Floats | None = None
) -> Ints:
    """Slots [tokens, k] that the tokens of one layer go to: each rank sends an equal part of them, in order, by its own ways.

    Args:
        ids: [tokens, k] logical experts.
        slot_to_expert: [slots] of the layer.
        n_experts: logical experts.
        topology: of the slots.
        n_ways: entries of an expert in a rank's table.
        shares: [slots], see ``deal_ways``; None: even.
    """
    out = np.empty_like(ids)
    given = None if shares is None else shares[None]
    for source, part in enumerate(np.array_split(np.arange(len(ids)), topology.n_ranks)):
        table = deal_ways(slot_to_expert[None], n_experts, topology, source=source, n_ways=n_ways, shares=given)[0]
        way = way_of_rows(len(part), n_ways, "cpu").numpy()
        out[part] = table[ids[part], way[:, None]]
    return out


def rank_lists(chosen: Ints, topology: Topology) -> list[RankList]:
    """The rows of every rank, for slots [tokens, k] that tokens chose."""
    found = []
    for rank in range(topology.n_ranks):
        first, stop = topology.first_slot[rank], topology.first_slot[rank + 1]
        local = np.where((chosen >= first) & (chosen < stop), chosen - first, -1)
        rows: npt.NDArray[np.int64] = local[(local >= 0).any(1)]
        here = rows[rows >= 0]
        found.append(RankList(slots=torch.from_numpy(rows.astype(np.int32)), n_tokens=len(here), activated=len(np.unique(here))))
    return found
