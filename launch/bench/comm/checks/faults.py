"""Ranks that do not come, that come late and that come back; what is refused, and in which words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .inputs import make_tokens
from .party import Party, answer, failure_of, require, trip

WAIT_MS = 1500  # longer than any rank of a busy machine is late


def missing(party: Party) -> dict[str, Any]:
    """The last rank stays away for one step: everybody says so, with rank, phase, epoch and tag; and so does the one that came late."""
    dispatcher = party.make(party.spec(timeout_ms=WAIT_MS))
    gone, tokens = party.size - 1, party.here(make_tokens(party.rank, 5, party.spec(), "random", 3))
    for _ in range(3):
        trip(dispatcher, party.rank, tokens)
    begin = time.monotonic()
    if party.rank == gone:
        while time.monotonic() - begin < 2.5 * WAIT_MS / 1000:
            time.sleep(0.05)
        error = failure_of(dispatcher, lambda: trip(dispatcher, party.rank, tokens, tag=61))
        require(error is not None, "who comes too late must not take sums for good")
        assert error is not None
    else:
        error = failure_of(dispatcher, lambda: trip(dispatcher, party.rank, tokens, tag=61))
        took = time.monotonic() - begin
        require(error is not None, "a missing rank is reported")
        assert error is not None
        found = (error.missing, error.phase, error.tag, error.epoch - error.seen)
        require(found == (gone, "dispatch", 61, 1) and error.epoch > 3, "the report names rank, phase, tag and epochs", found, error)
        require(took < 2 * WAIT_MS / 1000 + 2, "the report comes within the deadline", took)
    again = failure_of(dispatcher, lambda: trip(dispatcher, party.rank, tokens))
    require(again is not None or party.rank == gone, "a failed dispatcher stays failed")
    party.meet()
    dispatcher.close()
    return {"reported": str(error)}


def going_on(party: Party) -> dict[str, Any]:
    """Fault tolerant: the last rank stays away, the others go on without its experts, and it is taken in again."""
    dispatcher = party.make(party.spec(timeout_ms=WAIT_MS, fault_tolerant=True))
    spec, gone = dispatcher.spec, party.size - 1
    x, ids, weights = party.here(make_tokens(party.rank, 9, spec, "random", 5))
    without = torch.where(torch.div(ids, spec.slots_per_rank, rounding_mode="floor") == gone, -1, ids)
    everybody, rest = trip(dispatcher, party.rank, (x, ids, weights)), trip(dispatcher, party.rank, (x, without, weights))
    party.meet()
    if party.rank != gone:
        error = failure_of(
            dispatcher, lambda: require(torch.equal(trip(dispatcher, party.rank, (x, ids, weights)), rest), "the living are right")
        )
        require(error is None, "a fault-tolerant dispatcher goes on", error)
        require(dispatcher.active_mask() == [True] * gone + [False], "the mask names who is missing", dispatcher.active_mask())
        begin = time.monotonic()
        for _ in range(3):
            require(
                torch.equal(trip(dispatcher, party.rank, (x, ids, weights)), rest), "results without a rank have the bits of its absence"
            )
        require(time.monotonic() - begin < 3 * WAIT_MS / 1000, "nobody waits for who is known to be missing")
    party.meet()
    back_again(party, dispatcher, [True] * party.size)
    require(dispatcher.active_mask() == [True] * party.size, "everybody is back")
    for _ in range(2):
        require(torch.equal(trip(dispatcher, party.rank, (x, ids, weights)), everybody), "a rank that is taken in again takes part")
    party.meet()
    dispatcher.close()
    return {}


def back_again(party: Party, dispatcher: Any, mask: list[bool]) -> None:
    """``set_active``, which virtual ranks do all at once."""
    if party.backend != "virtual":
        dispatcher.set_active(mask)
        return
    own = [int(n) for n in dispatcher.state.epoch.tolist()]
    dispatcher.resume(mask, [max(row[channel] for row in party.gather(own)) for channel in range(len(own))])
    party.meet()


def refusals(party: Party) -> dict[str, Any]:
    """Bad calls raise before anything is sent, on every rank, in words with numbers; and the next call works."""
    dispatcher = party.make(party.spec())
    spec = dispatcher.spec
    x, ids, weights = party.here(make_tokens(party.rank, 4, spec, "random", 5))
    want = trip(dispatcher, party.rank, (x, ids, weights))
    many = party.here(make_tokens(party.rank, spec.max_tokens + 1, spec, "random", 5))
    refuse(
        ValueError, f"{spec.max_tokens + 1} tokens, but the dispatcher was made for at most {spec.max_tokens}", dispatcher.dispatch, *many
    )
    refuse(ValueError, f"x must be [T, {spec.hidden}], found [4, {spec.hidden - 1}]", dispatcher.dispatch, x[:, 1:], ids, weights)
    refuse(ValueError, f"x must be {spec.dtype}, found float16", dispatcher.dispatch, x.half(), ids, weights)
    refuse(ValueError, f"slot_ids must be [4, {spec.top_k}], found [4, {spec.top_k - 1}]", dispatcher.dispatch, x, ids[:, 1:], weights)
    refuse(ValueError, "slot_ids must be int32 or int64, found float32", dispatcher.dispatch, x, ids.float(), weights)
    wrong = torch.zeros(2, dtype=torch.int32, device=x.device)
    refuse(ValueError, "n_valid must be int32 [1]", dispatcher.dispatch, x, ids, weights, wrong)
    refuse(ValueError, "capacity must be between the 4 tokens", lambda: dispatcher.dispatch(x, ids, weights, capacity=3))
    refuse(ValueError, "scales belong to FP8", lambda: dispatcher.dispatch(x, ids, weights, scales=x[:, :1]))
    before = os.environ.get("RORQUAL_DEBUG")
    party.meet()  # ranks of one process share its environment: all have read it now
    os.environ["RORQUAL_DEBUG"] = "1"
    party.meet()
    beyond = torch.tensor([[-1, spec.n_slots, 0]] * 4, device=x.device)
    refuse(ValueError, f"slot ids must be -1 or 0..{spec.n_slots - 1}, found -1..{spec.n_slots}", dispatcher.dispatch, x, beyond, weights)
    require(torch.equal(trip(dispatcher, party.rank, (x, ids, weights)), want), "the call after a refused one works")
    party.meet()
    os.environ.pop("RORQUAL_DEBUG", None)
    if before is not None:
        os.environ["RORQUAL_DEBUG"] = before
    ticket = dispatcher.dispatch_send(x, ids, weights)
    refuse(ValueError, "layout must be one of rank, contiguous, masked, found 'heap'", dispatcher.dispatch_recv, ticket, "heap")
    routed = dispatcher.dispatch_recv(ticket)
    short = routed.x.new_zeros((len(routed.x) + 1, spec.hidden))
    refuse(ValueError, f"combine: y must be [{len(routed.x)}, {spec.hidden}], found", dispatcher.combine, short, routed)
    require(torch.equal(_finish(party, dispatcher, routed), want), "the call after a refused half works")
    refuse(ValueError, f"the mask has {party.size + 1} entries", dispatcher.set_active, [True] * (party.size + 1))
    dispatcher.close()
    dispatcher.close()
    refuse(RuntimeError, "dispatcher is closed", dispatcher.dispatch, x, ids, weights)
    refuse(RuntimeError, "dispatcher is closed", dispatcher.health)
    return {}


def _finish(party: Party, dispatcher: Any, routed: Any) -> torch.Tensor:
    out: torch.Tensor = dispatcher.combine(answer(routed, dispatcher.spec, party.rank)[0], routed)
    return out


def refuse(kind: type[Exception], text: str, work: Callable[..., Any], *args: Any) -> None:
    """``work`` must raise ``kind`` with ``text`` in its message."""
    try:
        work(*args)
    except kind as error:
        require(text in str(error), f"the message says {text!r}", error)
        return
    require(False, f"{kind.__name__} with {text!r} was due")


def disagreement(party: Party) -> dict[str, Any]:
    """Specs that differ are refused on every rank, with the field; and what no backend can have, with the reason."""
    if party.size > 1:
        first = party.rank == 0
        word = "disagree"
        refuse(ValueError, word, party.make, party.spec(max_tokens=16 if first else 32))
        refuse(ValueError, word, party.make, party.spec(payload="native" if first else "fp8"))
        refuse(ValueError, word, party.make, party.spec(timeout_ms=1000 if first else 2000))
        refuse(ValueError, word, party.make, party.spec(depth=1 if first else 2))
    refuse(ValueError, "EPSpec.alignment must be 1 or 128, found 64", party.make, party.spec(alignment=64))
    if party.size > 1:
        refuse(ValueError, "do not divide over", party.make, party.spec(n_slots=4 * party.size + 1))
    if True in party.reach.sums:
        refuse(ValueError, "fault_tolerant", party.make, replace(party.spec(), fault_tolerant=True, deterministic=True))
    return {}
