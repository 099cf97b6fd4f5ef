"""Measures of balance as a table: every published one, under the name that its engine gives it."""

from __future__ import annotations

from collections.abc import Mapping

from ...moe.eplb.metrics import MEASURES, Balance
from ..console import table


def balance_table(rows: Mapping[str, Balance], first: str = "loads of") -> str:
    """One row for each of several balances."""
    return table(
        [first, *MEASURES.values()],
        [[name, *(f"{getattr(found, field):.4f}" for field in MEASURES)] for name, found in rows.items()],
    )
