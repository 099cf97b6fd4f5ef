"""The choice of a DP rank for every request."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from .hashes import TOKEN_BYTES, page_hashes
from .kv_index import KvIndex
from .placed import Load, Placed
from .settings import RoutingSettings

#: tokens that a request is expected to generate before any has ended
_FIRST_GUESS = 512
#: what is left of ``Load.recent`` after another request
_FADE = 1 - 1 / 256


class Router:
    """Chooses the DP rank of every request and keeps account of what is open on each.

    For each completion: ``pick`` once, ``began`` at its first token, ``done`` at its end (also when aborted or refused
    after ``pick``). Unknown names are ignored by ``began`` and ``done``. Not thread safe.
    """

    def __init__(self, n_ranks: int, settings: RoutingSettings | None = None, *, page_size: int = 64) -> None:
        self.settings = settings or RoutingSettings()
        self.page_size = page_size
        self.loads = [Load() for _ in range(n_ranks)]
        self.index = KvIndex(n_ranks, self.settings.router_max_blocks)
        self._open: dict[str, Placed] = {}
        self._next = 0  # where the search for the least begins, so that ties go round
        self._soon: dict[int, int] = {}  # hash -> bits of ranks with an open request that has the page
        self._users: dict[tuple[int, int], int] = {}  # (hash, rank) -> open requests
        self._output = float(_FIRST_GUESS)  # mean of tokens generated, of late
        self._random = random.Random(self.settings.router_seed)
        self._last: tuple[bytes, list[int]] = (b"", [])  # the n completions of a prompt are hashed once

    @property
    def uses_kv(self) -> bool:
        """Whether leaders shall tell what their prefix caches hold."""
        return self.settings.dp_routing == "kv" and len(self.loads) > 1

    @property
    def tokens(self) -> list[int]:
        """Open tokens of each rank."""
        return [load.tokens for load in self.loads]

    # ---- requests

    def check(self, dp_rank: int | None) -> None:
        """Refuse a rank that a caller named.

        Raises:
            ValueError: there is no such rank.
        """
        if dp_rank is not None and not 0 <= dp_rank < len(self.loads):
            raise ValueError(f"data parallel rank {dp_rank} was asked for; there are ranks 0 to {len(self.loads) - 1}")

    def pick(
        self,
        name: str,
        prompt: bytes | Sequence[int],
        max_tokens: int,
        *,
        dp_rank: int | None = None,
        sure: bool = False,
        among: Collection[int] | None = None,
    ) -> int:
        """The rank that shall run a completion.

        Args:
            name: of the completion; no open one has it.
            prompt: token ids, or the bytes of them as int32.
            max_tokens: most that it may generate.
            dp_rank: the caller wants this one.
            sure: it will generate that many; otherwise what others generated of late is expected.
            among: ranks that may be chosen, at least one; all by default.

        Raises:
            ValueError: there is no rank ``dp_rank``.
        """
        n_ranks = len(self.loads)
        self.check(dp_rank)
        assert name not in self._open, f"{name} is open already"
        n_prompt = len(prompt) // TOKEN_BYTES if isinstance(prompt, bytes) else len(prompt)
        output = max_tokens if sure else min(max_tokens, math.ceil(self._output))
        hashes = self.hashes(prompt) if self.uses_kv else []
        overlaps = self.index.overlaps(hashes, self._soon) if hashes else [0] * n_ranks
        placed = Placed(
            rank=0,
            tokens=n_prompt + output,
            pages=-(-(n_prompt + output) // self.page_size),
            prefill=-(-n_prompt // self.page_size),
            hashes=hashes,
        )
        if dp_rank is not None:
            placed.rank = dp_rank
            self.loads[dp_rank].pinned += 1
        else:
            turns = [(self._next + i) % n_ranks for i in range(n_ranks)]
            placed.rank = self._choose(placed, overlaps, turns if among is None else [rank for rank in turns if rank in among])
            self._next = (placed.rank + 1) % n_ranks
        self._place(name, placed, overlaps[placed.rank])
        return placed.rank

    def began(self, name: str) -> None:
        """The first token of a completion came: its prompt is computed."""
        placed = self._open.get(name)
        if placed is not None:
            self.loads[placed.rank].prefill -= placed.prefill
            placed.prefill = 0

    def done(self, name: str, generated: int | None = None) -> None:
        """A completion has ended, after ``generated`` tokens; None when that tells nothing of others (aborted, refused)."""
        placed = self._open.pop(name, None)
        if placed is None:
            return
        if generated is not None:
            self._output += (generated - self._output) / 32
        load = self.loads[placed.rank]
        load.requests -= 1
        load.tokens -= placed.tokens
        load.prefill -= placed.prefill
        load.decode -= placed.pages
        for value in placed.hashes:
            self._unuse(value, placed.rank)

    # ---- prefix caches

    def hashes(self, prompt: bytes | Sequence[int]) -> list[int]:
        """Names of the whole pages of a prompt (``page_hashes``); those of the last prompt are kept."""
        data = prompt if isinstance(prompt, bytes) else np.asarray(prompt, dtype="<i4").tobytes()
        if data != self._last[0]:
            self._last = (data, page_hashes(data, self.page_size))
        return self._last[1]

    def heard(self, rank: int, data: bytes) -> bool:
        """News of a replica's prefix cache (``KvLog.take``); False when some were lost, so that it must tell everything.

        Raises:
            ValueError: bytes that are none.
        """
        return self.index.heard(rank, data)

    # ---- reports

    def snapshot(self) -> dict[str, Any]:
        """What was decided so far and what is open, for metrics; lists have an entry a rank."""
        loads = self.loads
        return {
            "policy": self.settings.dp_routing,
            "picked": [load.picked for load in loads],
            "pinned": [load.pinned for load in loads],
            "open_requests": [load.requests for load in loads],
            "open_tokens": [load.tokens for load in loads],
            "prefill_blocks": [load.prefill for load in loads],
            "decode_blocks": [load.decode for load in loads],
            "prompt_blocks": [load.prompt_pages for load in loads],
            "hit_blocks": [load.hit_pages for load in loads],
            "cached_blocks": list(self.index.blocks),
            "ignored_blocks": self.index.ignored,
            "lost_news": self.index.gaps,
        }

    # ---- inside

    def _choose(self, placed: Placed, overlaps: list[int], turns: Sequence[int]) -> int:
        """One of ``turns``: of equally good ranks the first."""
        policy, loads = self.settings.dp_routing, self.loads
        if policy == "round_robin":
            return turns[0]
        if policy == "total_requests":
            return min(turns, key=lambda rank: loads[rank].requests)
        if policy == "total_tokens":
            return min(turns, key=lambda rank: loads[rank].tokens)
        costs = self._costs(placed, overlaps)
        return (
            self._draw(costs, turns) if self.settings.router_temperature else min(turns, key=lambda rank: (costs[rank], loads[rank].recent))
        )

    def _costs(self, placed: Placed, overlaps: list[int]) -> list[float]:
        """Work of each rank if it had the request too, in pages: to prefill, weighted, and being decoded.

        A rank that got more than its share of late costs more, the busier all are: else popular prefixes would stay where
        they came first. With nothing else open a conversation stays where it is.
        """
        weight, loads = self.settings.overlap_score_weight, self.loads
        busy = min(1.0, sum(load.requests for load in loads) / len(loads))
        ahead, share = self.settings.router_balance_weight * busy / self.page_size, sum(load.recent for load in loads) / len(loads)
        return [
            weight * (load.prefill + placed.prefill - overlap) + load.decode + placed.pages + ahead * (load.recent - share)
            for load, overlap in zip(loads, overlaps, strict=True)
        ]

    def _draw(self, costs: list[float], turns: Sequence[int]) -> int:
        """A rank at random, with weights exp(-cost / temperature), costs scaled to 0 to 1."""
        low, high = min(costs[rank] for rank in turns), max(costs[rank] for rank in turns)
        if high == low:
            return turns[0]
        scale = (high - low) * self.settings.router_temperature
        return self._random.choices(turns, [math.exp((low - costs[rank]) / scale) for rank in turns])[0]

    def _place(self, name: str, placed: Placed, overlap: int) -> None:
        load = self.loads[placed.rank]
        placed.prefill -= overlap
        load.picked += 1
        load.requests += 1
        load.tokens += placed.tokens
        load.prefill += placed.prefill
        load.prompt_pages += len(placed.hashes)
        load.hit_pages += overlap
        load.decode += placed.pages
        for each in self.loads:
            each.recent *= _FADE
        load.recent += placed.tokens
        bit = 1 << placed.rank
        for value in placed.hashes:
            users = self._users.get((value, placed.rank), 0)
            self._users[value, placed.rank] = users + 1
            if not users:
                self._soon[value] = self._soon.get(value, 0) | bit
        self._open[name] = placed

    def _unuse(self, value: int, rank: int) -> None:
        users = self._users[value, rank] - 1
        if users:
            self._users[value, rank] = users
            return
        del self._users[value, rank]
        rest = self._soon[value] & ~(1 << rank)
        if rest:
            self._soon[value] = rest
        else:
            del self._soon[value]
