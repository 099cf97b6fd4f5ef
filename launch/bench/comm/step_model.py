"""A decode or prefill step with expert parallelism, projected onto a cluster: times of layers, bytes of exchanges, speeds of links.

Everything here is arithmetic on numbers that are given or were measured elsewhere. It says what a cluster could do if its links did
what is assumed; nothing of it was run.

A layer is attention (A), dispatch (D), experts (E) and combine (C). One batch after the other a layer takes A + D + E + C. With two
micro-batches, a and b, each exchange of one runs beside a computation of the other:

    computes   A_a        A_b        E_a        E_b        A_a of the next layer
    exchanges  C_b before D_a        D_b        C_a        C_b

and a layer takes the sum of the longer of each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....comm.dispatcher import EPSpec
from ....comm.wire import Wire
from ..results import Row


@dataclass(frozen=True, kw_only=True)
class Link:
    """An exchange takes ``latency_us`` and its bytes at ``gb_per_s``."""

    latency_us: float  # of an exchange of nothing
    gb_per_s: float  # one way, of one rank

    def us(self, n_bytes: float) -> float:
        """Microseconds of an exchange of ``n_bytes``; none of none."""
        return self.latency_us + n_bytes / self.gb_per_s / 1e3 if n_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks and what joins them."""

    ranks: int  # expert-parallel ranks, a GPU each
    ranks_per_node: int  # of them with a link of the first kind between them
    inside: Link  # between ranks of a node
    between: Link  # between nodes
    two_level: bool  # a token goes to a node once and is passed on there
    processors: int = 132  # multiprocessors of a GPU

    @property
    def nodes(self) -> int:
        """Hosts."""
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The step of one rank."""

    layers: int  # with experts
    tokens: int  # of a rank
    hidden: int  # values of a token
    top_k: int  # choices of a token, spread evenly over all experts
    slots: int  # experts of all ranks
    payload: str  # as in ``EPSpec``
    attention_us: tuple[float, float]  # everything of a layer but experts and exchanges: of the batch, of half of it
    expert_us: tuple[float, float]  # the experts of a layer: of the batch, of half of it
    exchange_sms: int  # multiprocessors that exchanges take from what runs beside them


def distinct(parts: int, slots: int, top_k: int) -> float:
    """Expected number of ``parts`` equal parts of ``slots`` experts that a token's ``top_k`` different choices fall into."""
    size = slots // parts
    missed = math.comb(slots - size, top_k) / math.comb(slots, top_k) if slots - size >= top_k else 0.0
    return parts * (1.0 - missed)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One dispatch or combine of ``tokens`` tokens."""

    inside: float  # bytes of a rank that stay in its node
    between: float  # bytes of a rank that leave it
    us: float  # time


def exchange(cluster: Cluster, load: Load, tokens: float, row_bytes: int) -> Exchange:
    """Time of rows of ``row_bytes`` from every token to its ranks, or of as many results back."""
    ranks = distinct(cluster.ranks, load.slots, load.top_k)
    own_node = ranks / cluster.nodes  # ranks that a token reaches in any one node
    here = own_node * (cluster.ranks_per_node - 1) / cluster.ranks_per_node if cluster.nodes > 1 else ranks * (1 - 1 / cluster.ranks)
    away = ranks - own_node if cluster.nodes > 1 else 0.0
    inside, between = tokens * row_bytes * here, tokens * row_bytes * away
    if cluster.two_level and cluster.nodes > 1:
        nodes = distinct(cluster.nodes, load.slots, load.top_k)
        between = tokens * row_bytes * nodes * (1 - 1 / cluster.nodes)
        inside = tokens * row_bytes * ranks * (1 - 1 / cluster.ranks_per_node)
        return Exchange(inside=inside, between=between, us=cluster.between.us(between) + _second_hop(cluster, inside, between))
    return Exchange(inside=inside, between=between, us=max(cluster.inside.us(inside), cluster.between.us(between)))


def _second_hop(cluster: Cluster, inside: float, between: float) -> float:
    """What passing on adds: its latency, and its bytes as far as they take longer than those that arrive meanwhile."""
    own, first = cluster.inside.us(inside), cluster.between.us(between)
    return cluster.inside.latency_us + max(0.0, own - cluster.inside.latency_us - first)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A step of one rank, in microseconds a layer unless said otherwise."""

    dispatch: Exchange  # of the whole batch
    combine: Exchange  # of the whole batch
    plain_us: float  # a layer, one batch after the other
    overlap_us: float  # a layer, two micro-batches
    hidden: float  # share of the micro-batches' exchanges that adds nothing
    plain_ms: float  # the step
    overlap_ms: float  # the step
    tokens_per_s: float  # of a rank, the faster way


def project(cluster: Cluster, load: Load) -> Projection:
    """The step of ``load`` on ``cluster``.

    Raises:
        ValueError: the experts cannot be shared out, or exchanges would take all multiprocessors.
    """
    if load.slots % cluster.ranks or cluster.ranks % cluster.nodes:
        raise ValueError(f"{load.slots} experts cannot be shared out over {cluster.ranks} ranks on {cluster.nodes} nodes evenly")
    if load.exchange_sms >= cluster.processors:
        raise ValueError(f"exchanges on {load.exchange_sms} multiprocessors leave none of {cluster.processors} for anything else")
    spec = EPSpec(
        n_ranks=cluster.ranks, n_slots=load.slots, hidden=load.hidden, top_k=load.top_k, max_tokens=load.tokens, payload=load.payload,
        dtype="bfloat16",
    )  # fmt: skip
    row, result = Wire.of(spec).row_bytes + 8 * load.top_k, 2 * load.hidden
    d, c = (exchange(cluster, load, load.tokens, n) for n in (row, result))
    d2, c2 = (exchange(cluster, load, load.tokens / 2, n).us for n in (row, result))
    plain = load.attention_us[0] + d.us + load.expert_us[0] + c.us
    slower = cluster.processors / (cluster.processors - load.exchange_sms)
    a2, e2 = load.attention_us[1], load.expert_us[1]

    def beside(work: float, other: float) -> float:
        """Work slows down while the other takes its multiprocessors: ``other`` microseconds of it at most."""
        done = other / slower  # of the work, when the other ends
        return max(other, work * slower) if done >= work else other + (work - done)

    overlap = beside(a2, c2) + beside(a2, d2) + beside(e2, d2) + beside(e2, c2)
    exposed = overlap - 2 * (a2 + e2)
    best = min(plain, overlap)
    return Projection(
        dispatch=d, combine=c, plain_us=plain, overlap_us=overlap, hidden=max(0.0, 1.0 - exposed / (2 * (d2 + c2))) if d2 + c2 else 0.0,
        plain_ms=load.layers * plain / 1e3, overlap_ms=load.layers * overlap / 1e3,
        tokens_per_s=1e6 * load.tokens / (load.layers * best),
    )  # fmt: skip


def fit(rows: Sequence[Row], name: str) -> Link:
    """The line through measured times of ``name`` ("dispatch" or "combine") over their bytes: latency and bandwidth.

    Raises:
        ValueError: fewer than two different sizes.
    """
    points = [(float(r.params["link_bytes"]), r.value) for r in rows if r.name == name and r.unit == "us" and "link_bytes" in r.params]
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line needs {name} times of two sizes at least, found {len(points)} rows")
    low, high = min(points), max(points)
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if slope <= 0:
        raise ValueError(f"{name} of {high[0]:.0f} bytes took {high[1]:.1f} us, no longer than {low[1]:.1f} us of {low[0]:.0f} bytes")
    return Link(latency_us=max(0.0, low[1] - slope * low[0]), gb_per_s=1e-3 / slope)
