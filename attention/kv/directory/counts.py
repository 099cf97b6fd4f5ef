"""Counters of a member."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DirectoryCounts:
    """What happened to one member so far."""

    asked: int = 0  # pages that ``match`` was asked for
    matched: int = 0  # of these, pages it returned
    published: int = 0  # pages of its own that others can find
    present: int = 0  # pages that it offered and that were there already
    verified: int = 0  # checksums computed over a page of the pool
    withdrawn: int = 0  # of these, wrong ones
    busy: int = 0  # matches that found the store locked and returned nothing
    reclaimed: int = 0  # dead members taken apart by this one
