"""What a request holds while it runs: a slot, pages, a place in the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass

from ..offload.stay import Stay
from ..plan import I32
from ..request import Request
from .prefix_node import PrefixNode


@dataclass(eq=False, kw_only=True, slots=True)
class Seat:
    """One stay of a request in the running set, from admission to preemption or end.

    A seat outlives the stay until the last launched step that names it has completed; only then do its slot and pages
    return. ``total`` and ``computed`` are the request's, kept here because every step reads them.
    """

    request: Request
    rank: tuple[int, int]  # (priority, index): lower runs first
    slot: int
    pages: list[int]  # the page table; shared with ``request.pages`` while the stay lasts
    node: PrefixNode | None  # end of the locked path in the prefix tree; its pages are the first ones of ``pages``
    tokens: I32 | None  # tokens known at admission, until they are stored in the prefix tree
    limit: int  # length at which the request ends, tokens
    total: int  # known and launched tokens
    computed: int  # leading positions whose KV rows have been launched
    eos_ids: frozenset[int]  # end tokens of the model, empty with ignore_eos
    stop_ids: frozenset[int]  # the request's own stop tokens
    stay: Stay | None = None  # what it holds of the device, with offloading
    guided: bool = False  # its grammar must know a token before the next one is sampled
    ready_step: int = 0  # first step that may decode it again
    last_step: int = -1  # last launched step that names it
    live: bool = True  # False once the stay has ended
