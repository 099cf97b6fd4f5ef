"""Small messages between some ranks of a group, of which others may be dead."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ..parallel.group import Group

_TAG = 77  # of these messages, apart from those that pipelines and mailboxes use


def exchange_ints(group: Group, members: Sequence[int], values: Sequence[int]) -> list[list[int]]:
    """``values`` (the same number everywhere) of every rank of ``members`` (indices in ``group``, ascending), in their order.

    Only members call it. Every pair talks by itself, so a dead rank outside ``members`` holds nobody up. CollectiveError if a
    member does not come within the group's deadline.
    """
    mine = torch.tensor(list(values), dtype=torch.int64)
    others = [rank for rank in members if rank != group.index]
    sends = [group.send_async(mine.clone(), rank, _TAG) for rank in others]
    found = {rank: group.recv_async(torch.empty_like(mine), rank, _TAG) for rank in others}
    told = {rank: pending.wait().tolist() for rank, pending in found.items()}
    for pending in sends:
        pending.wait()
    told[group.index] = mine.tolist()
    return [told[rank] for rank in members]


def agreed_epochs(group: Group, mask: Sequence[bool], epochs: Sequence[int]) -> list[int]:
    """The highest of the members' ``epochs`` [channels], channel by channel. Collective over the members, which ``mask`` names.

    Raises:
        ValueError: the members gave different masks.
    """
    members = [rank for rank, there in enumerate(mask) if there]
    mark = zlib.crc32(bytes(map(int, mask)))
    told = exchange_ints(group, members, [mark, *epochs])
    if any(row[0] != mark for row in told):
        raise ValueError(f"set_active: the ranks {[group.ranks[rank] for rank in members]} gave different masks")
    return [max(column) for column in zip(*(row[1:] for row in told), strict=True)]
