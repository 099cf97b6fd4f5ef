"""What is measured: how many tokens of which width go to how many experts, and in which payload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ....comm.dispatcher import EPSpec
from ....comm.rows import token_dtype
from ....comm.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    backend: str  # of the dispatcher
    tokens: int  # of every rank
    hidden: int  # values of a token
    top_k: int  # choices of a token
    slots: int  # experts of all ranks
    payload: str  # as in ``EPSpec``
    max_sms: int  # multiprocessors of a send
    dtype: str = "bfloat16"  # of tokens and results

    def spec(self, n_ranks: int) -> EPSpec:
        """The dispatcher's spec. ValueError if the slots cannot be shared out."""
        if self.slots % n_ranks:
            raise ValueError(f"--slots {self.slots} must be a multiple of the {n_ranks} ranks")
        return EPSpec(
            n_ranks=n_ranks, n_slots=self.slots, hidden=self.hidden, top_k=self.top_k, max_tokens=self.tokens, payload=self.payload,
            dtype=self.dtype, max_sms=self.max_sms, timeout_ms=20_000,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tokens of one rank: routed to experts at random, none twice."""

    x: torch.Tensor  # [T, hidden]
    ids: torch.Tensor  # int32 [T, k]
    weights: torch.Tensor  # float32 [T, k]

    @classmethod
    def make(cls, spec: EPSpec, rank: int, tokens: int, device: torch.device, turn: int = 0) -> Inputs:
        """Any rank can make those of any other; every ``turn`` has its own."""
        gen = torch.Generator().manual_seed(rank + 10_007 * turn)
        x = torch.randn(tokens, spec.hidden, generator=gen).to(token_dtype(spec))
        ids = torch.rand(tokens, spec.n_slots, generator=gen).argsort(dim=1)[:, : spec.top_k].int()
        weights = torch.rand(tokens, spec.top_k, generator=gen)
        return cls(x=x.to(device), ids=ids.contiguous().to(device), weights=weights.to(device))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one rank's dispatch and of the results that come back to it, over symmetric memory."""

    dispatch: int  # rows and choices that leave for other ranks
    combine: int  # results from other ranks
    everything: int  # rows of all destinations, this rank among them: what other tables call bandwidth
    results: int  # results of all ranks, this rank among them
    per_rank: tuple[int, ...]  # bytes that leave for each rank

    @classmethod
    def of(cls, spec: EPSpec, rank: int, ids: torch.Tensor) -> Traffic:
        """From the choices [T, k] of ``rank``: a token goes to a rank once, whatever the number of its experts there."""
        wire, ranks = Wire.of(spec), torch.div(ids.cpu(), spec.slots_per_rank, rounding_mode="floor")
        rows = [int(((ranks == r) & (ids.cpu() >= 0)).any(dim=1).sum()) for r in range(spec.n_ranks)]
        choices, home = 8 * len(ids) * spec.top_k, spec.hidden * wire.home_itemsize
        leaving = tuple(0 if r == rank else n * wire.row_bytes + choices for r, n in enumerate(rows))
        away = sum(rows) - rows[rank]
        return cls(
            dispatch=sum(leaving), combine=away * home, everything=sum(rows) * wire.row_bytes, results=sum(rows) * home, per_rank=leaving
        )


def cases(
    *, backends: Sequence[str], tokens: Sequence[int], hidden: Sequence[int], top_k: Sequence[int], payloads: Sequence[str],
    slots: int, max_sms: int, sms: Sequence[int] = (), sms_tokens: Sequence[int] = (),
) -> Iterator[Case]:  # fmt: skip
    """The grid of the table, then time against multiprocessors for ``sms_tokens`` of the backends that bound them."""
    for h in hidden:
        for k in top_k:
            for payload in payloads:
                for n in tokens:
                    for backend in backends:
                        yield Case(backend=backend, tokens=n, hidden=h, top_k=k, slots=slots, payload=payload, max_sms=max_sms)
    for n in sms_tokens:
        for bound in sms:
            for backend in backends:
                if backend not in ("torch", "torch_node", "torch_static", "local", "deep_ep"):
                    yield Case(backend=backend, tokens=n, hidden=hidden[0], top_k=top_k[0], slots=slots, payload=payloads[0], max_sms=bound)
