"""What ``page_places.page_places`` computes, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PagePlaces(NamedTuple):
    """Where the pages of a step's requests are."""

    latent_table: torch.Tensor  # int32 [R, P], device page, -1: absent
    host_table: torch.Tensor | None  # int32 [R, P], host page, -1: none; None where it was not asked for
    moving: torch.Tensor | None  # int8 [R]; None likewise
    write_rows: torch.Tensor | None  # int64 [R], latent row of every request's position; None without positions


def page_places(
    device_page: torch.Tensor,
    host_page: torch.Tensor,
    moving: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    page_size: int,
    everywhere: bool,
) -> PagePlaces:
    """Look up the pages of every request of a step.

    Args:
        device_page: int32 [n_logical + 1], device page of every logical page, -1: absent.
        host_page: int32 [n_logical + 1], host page, -1: none.
        moving: int8 [n_slots + 1].
        page_table: int32 [R, P], logical pages of every request.
        slots: int64 [R], request slots.
        positions: int64 [R], the token that every request writes in a step of one token each, or None.
        page_size: rows a page.
        everywhere: look in ``host_page`` and ``moving`` too.
    """
    latent = device_page.index_select(0, page_table.reshape(-1)).view(page_table.shape)
    rows = None
    if positions is not None:
        page = latent.gather(1, (positions // page_size)[:, None])[:, 0].long() if len(positions) else positions
        rows = page * page_size + positions % page_size
    if not everywhere:
        return PagePlaces(latent, None, None, rows)
    host = host_page.index_select(0, page_table.reshape(-1)).view(page_table.shape)
    return PagePlaces(latent, host, moving.index_select(0, slots), rows)
