"""What the router keeps of an open request, and of each replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Placed:
    """An open request."""

    rank: int
    tokens: int  # prompt, and what it will probably generate
    pages: int  # that it will have in the end
    prefill: int  # pages of the prompt that are not cached, until the first token
    hashes: list[int]  # of its whole prompt pages; kv only


@dataclass(kw_only=True, slots=True)
class Load:
    """What is open on one replica, and what has been so far."""

    requests: int = 0
    tokens: int = 0
    prefill: int = 0  # pages of prompts under way that its cache does not have
    decode: int = 0  # pages of open requests; each counts all of its own, since sharing saves memory but no attention
    recent: float = 0.0  # tokens sent there of late
    picked: int = 0  # requests so far
    pinned: int = 0  # of these, by their callers' wish
    prompt_pages: int = 0  # whole pages of all prompts so far
    hit_pages: int = 0  # of these, expected in the cache
