"""The kernels over peer memory against their twins and against plain loops, with all ranks in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.ops import PeerOps
from rorqual.comm.rows import DTYPES
from rorqual.comm.state import Failure, Status
from rorqual.comm.virtual import VirtualRanks
from rorqual.comm.wire import COMBINE, DISPATCH
from tests.comm.kernels.peer_problem import World, check_arrived, close, make_tokens, outputs, whole_trip
from tests.comm.routing import KINDS
from tests.kernels import casts, interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's fma rounds twice, which quotients to the last bit do not bear."""
    from triton.runtime import interpreter as runtime

    def fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return runtime.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(runtime.InterpreterBuilder, "create_fma", fma)
    interpreter.repair()
    casts.repair()


def spec(**more: object) -> EPSpec:
    given = {"n_ranks": 3, "n_slots": 12, "hidden": 72, "top_k": 3, "max_tokens": 5, "dtype": "float32", "depth": 2}
    return EPSpec(**{**given, **more})  # type: ignore[arg-type]


def world(kind: str = "triton", pull: bool = False, **more: object) -> World:
    return World(spec=spec(**more), ops=PeerOps.load(kind), device=CPU, pull=pull)


@pytest.mark.parametrize(
    ("payload", "dtype", "more"),
    [
        ("native", "float32", {}),
        ("native", "float32", {"deterministic": True}),
        ("native", "float32", {"pull": True}),
        ("native", "float16", {"hidden": 36, "n_ranks": 2, "top_k": 8, "n_slots": 20}),
        ("native", "float16", {"hidden": 33, "deterministic": True}),  # rows that are no multiple of 4 bytes
        ("bf16", "float32", {"hidden": 16}),
        ("bf16", "float16", {"hidden": 33}),
        ("fp8", "float32", {"hidden": 200}),
        ("fp8_ue8m0", "float16", {"hidden": 384, "n_ranks": 1}),
    ],
)
def test_a_whole_trip(payload, dtype, more):
    w = world(payload=payload, dtype=dtype, **more)
    counts = [5, 0, 3]
    kinds = KINDS if not more else ("random", "with_none", "repeated")
    for seed, kind in enumerate(kinds):
        tokens = [make_tokens(w.spec, r, counts[(r + seed) % 3], kind, seed, CPU) for r in range(w.spec.n_ranks)]
        for result, t in zip(whole_trip(w, tokens, channel=seed % 2, indexed=seed % 3 != 0 or w.spec.deterministic), tokens, strict=True):
            close(w, result, t)
        w.poison()
    assert [int(s.epoch.sum()) for s in w.states.values()] == [len(kinds)] * w.spec.n_ranks
    assert all(not s.status.any() and not s.arrived.any() for s in w.states.values())


def test_results_that_lie_at_home_already_are_not_moved():
    w = world(pull=True, hidden=24)
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU) for r in range(3)]
    for rank, t in enumerate(tokens):
        w.send(rank, t)
    for rank in range(3):
        slots, shares = w.receive(rank)
        y = w.blocks(rank).home.flatten(0, 1)
        here = torch.where(slots >= 0, shares * (1.0 + 0.5 * (slots + 4 * rank)), 0.0).sum(dim=1, keepdim=True)
        y.copy_(w.blocks(rank).values * here)
        before = y.clone()
        w.home(rank, y, slots)
        assert torch.equal(y.view(torch.int32), before.view(torch.int32))
    for rank, t in enumerate(tokens):
        close(w, w.sum(rank, t), t)


def test_a_dispatcher_offers_where_results_may_lie():
    given = {"device": CPU, "ops": PeerOps.load("triton")}
    ranks = VirtualRanks.make(spec(hidden=24), **given).ranks
    tokens = [make_tokens(ranks[0].spec, r, 5, "random", 2, CPU) for r in range(3)]
    tickets = [d.dispatch_send(t.x, t.ids, t.weights) for d, t in zip(ranks, tokens, strict=True)]
    for rank, (d, ticket) in enumerate(zip(ranks, tickets, strict=True)):
        routed = d.dispatch_recv(ticket, layout="rank")
        y = d.results(routed)
        here = torch.where(routed.slots >= 0, routed.shares * (1.0 + 0.5 * (routed.slots + 4 * rank)), 0.0).sum(dim=1, keepdim=True)
        y.copy_(routed.x * here)
        d.combine_send(y, routed)
    w = world(hidden=24)
    for d, ticket, t in zip(ranks, tickets, tokens, strict=True):
        close(w, d.combine_recv(ticket), t)
    for more in ({"fault_tolerant": True}, {"deterministic": True}):
        (alone,) = VirtualRanks.make(spec(n_ranks=1, **more), **given).ranks
        t = make_tokens(alone.spec, 0, 2, "random", 2, CPU)
        assert alone.results(alone.dispatch(t.x, t.ids, t.weights, layout="rank")) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_and_twins_give_the_same_bits(deterministic):
    """Also every operation of one after every operation of the other: they are one protocol."""
    results = []
    for kind in ("triton", "torch"):
        w = world(kind, deterministic=deterministic, hidden=40)
        tokens = [make_tokens(w.spec, r, 5, "random", 4, CPU) for r in range(3)]
        results.append(([*whole_trip(w, tokens)], [s.sent for s in w.states.values()], [w.blocks(r).flags.clone() for r in range(3)]))
    for got, expected in zip(*results, strict=True):
        for a, b in zip(got, expected, strict=True):
            if a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=3e-7, atol=0)
            else:
                assert torch.equal(a, b)


def test_values_that_are_fp8_already_keep_their_scales():
    w = world(payload="fp8", hidden=300)
    tokens = [make_tokens(w.spec, r, 4, "random", 1, CPU) for r in range(3)]
    for t in tokens:
        t.x = torch.randint(0, 120, (4, 300), dtype=torch.uint8).view(torch.float8_e4m3fn)
        t.scales = torch.rand(3, 4).t()  # column by column, as a quantiser lays them
    for rank, t in enumerate(tokens):
        w.send(rank, t)
    for rank in range(3):
        check_arrived(w, rank, tokens, *w.receive(rank))


def test_bytes_travel_as_they_are():
    w = world(payload="bytes", dtype="uint8", hidden=48) if "uint8" in DTYPES else world(payload="bytes", hidden=48)
    tokens = [make_tokens(w.spec, r, 5, "with_none", 1, CPU) for r in range(3)]
    for rank, t in enumerate(tokens):
        w.send(rank, t)
    for rank in range(3):
        check_arrived(w, rank, tokens, *w.receive(rank))


def test_tokens_behind_the_valid_ones_do_not_travel():
    w = world(hidden=24)
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU, n_valid=n) for r, n in enumerate((2, 5, 0))]
    for result, t in zip(whole_trip(w, tokens), tokens, strict=True):
        close(w, result, t)


def test_wide_groups_and_wide_ids():
    """More ranks than bits of a word, int64 ids, more programs than items."""
    w = world(n_ranks=66, n_slots=132, hidden=16, max_tokens=2, top_k=6)
    t = make_tokens(w.spec, 65, 2, "random", 2, CPU)
    t.ids[0] = torch.tensor([0, 1, 129, 131, 127, -1])
    narrow, t.ids = t.ids, t.ids.long()
    w.send(65, t)
    for rank in range(66):
        wanted = ((narrow // 2 == rank) & (narrow >= 0)).any(dim=1)
        rows = w.blocks(rank).rows[65]
        assert torch.equal(rows[wanted].view(torch.float32), t.x[wanted])
        assert bool((rows[~wanted] == 0xFF).all())
        assert torch.equal(w.blocks(rank).ids[65], narrow) and torch.equal(w.blocks(rank).weights[65], t.weights)
        assert w.blocks(rank).flags[DISPATCH, 65].tolist() == [1, 2]


def test_a_narrower_call_on_the_same_workspace():
    w = world(hidden=24)
    w.wire = w.wire.narrowed(3)
    tokens = [make_tokens(w.spec, r, 3, "random", 2, CPU) for r in range(3)]
    for t in tokens:
        t.ids, t.weights = t.ids.contiguous(), t.weights.contiguous()
    for result, t in zip(whole_trip(w, tokens), tokens, strict=True):
        close(w, result, t)


def test_rows_may_lie_apart():
    w = world(hidden=24)
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU) for r in range(3)]
    for t in tokens:
        wide = torch.full((5, 31), float("nan"))
        wide[:, 3:27] = t.x
        t.x = wide[:, 3:27]
    for result, t in zip(whole_trip(w, tokens), tokens, strict=True):
        close(w, result, t)


def words(state) -> dict[str, int]:
    return {field.name: int(state.status[field]) for field in Status}


@pytest.mark.parametrize("kind", ["triton"])
def test_a_missing_rank_is_named(kind):
    w = world(kind)
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU) for r in range(3)]
    whole_trip(w, tokens)
    for rank in (0, 2):
        w.send(rank, tokens[rank])
    slots, shares = w.receive(0, tag=9, timeout_ms=5)
    assert words(w.states[0]) == {
        "FAILED": Failure.MISSED, "PHASE": DISPATCH, "EPOCH": 2, "MISSING": 1, "SEEN": 1, "TAG": 9, "CHANNEL": 0, "COUNT": 0,
    }  # fmt: skip
    assert bool((slots[5:10] == -1).all() and (shares[5:10] == 0).all()) and bool((slots[:5] >= 0).any())
    before = w.states[0].status.clone()
    w.home(0, torch.zeros(15, 72), slots)
    assert torch.equal(w.sum(0, tokens[0], timeout_ms=1 << 40)[5:], torch.empty(0, 72))  # ends at its first look
    assert torch.equal(w.states[0].status, before), "the first failure stays"
    w.send(0, tokens[0])
    assert w.blocks(2).flags[:, 0].tolist() == [[2, 5], [1, 0]], "a rank that failed says nothing more"


def test_a_late_result_is_named():
    w = world()
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU) for r in range(3)]
    for rank in range(3):
        w.send(rank, tokens[rank])
    for rank in (0, 1):
        slots, shares = w.receive(rank)
        y, index = outputs(w, rank, slots)
        w.home(rank, y, slots, index=index, shares=shares)
    w.sum(1, tokens[1], timeout_ms=5, tag=4)
    found = words(w.states[1])
    assert (found["FAILED"], found["PHASE"], found["MISSING"], found["SEEN"], found["TAG"]) == (Failure.MISSED, COMBINE, 2, 0, 4)


def test_a_fault_tolerant_group_goes_on_without_the_rank():
    w = world()
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU) for r in range(3)]
    for rank in (0, 2):
        w.send(rank, tokens[rank])
    received = {rank: w.receive(rank, timeout_ms=5, tolerant=True) for rank in (0, 2)}
    for rank, (slots, shares) in received.items():
        assert w.states[rank].active.tolist() == [1, 0, 1]
        y, index = outputs(w, rank, slots)
        w.home(rank, y, slots, index=index, shares=shares)
    for rank in (0, 2):
        result = w.sum(rank, tokens[rank], timeout_ms=5, tolerant=True)
        lost = tokens[rank].ids // w.spec.slots_per_rank == 1
        tokens[rank].weights[lost] = 0.0
        close(w, result, tokens[rank])
        assert words(w.states[rank])["MISSING"] == 1
    flags = w.blocks(1).flags
    assert flags[COMBINE].eq(0).all(), "nothing is sent to a rank that is not there"


def test_impossible_flags_are_reported():
    w = world()
    tokens = [make_tokens(w.spec, r, 5, "random", 2, CPU) for r in range(3)]
    for rank in range(3):
        w.send(rank, tokens[rank])
    w.blocks(0).flags[DISPATCH, 1, 1] = 6
    slots, _ = w.receive(0)
    assert bool((slots[5:10] == -1).all())
    found = words(w.states[0])
    assert (found["FAILED"], found["MISSING"], found["COUNT"]) == (Failure.COUNT, 1, 6)
    w.blocks(2).flags[DISPATCH, 0, 0] = 2
    w.receive(2, tolerant=True)
    found = words(w.states[2])
    assert (found["FAILED"], found["MISSING"], found["SEEN"]) == (Failure.LEFT_OUT, 0, 2)


def test_what_does_not_fit_is_refused():
    w = world()
    t = make_tokens(w.spec, 0, 5, "random", 2, CPU)
    with pytest.raises(ValueError, match="6 rows, the layout has room for 5"):
        w.send(0, make_tokens(w.spec, 0, 6, "random", 2, CPU))
    with pytest.raises(ValueError, match="rows of 72 contiguous values"):
        w.ops.send_tokens(w.wire, w.peers[0], w.states[0], t.x[:, :71], t.ids, t.weights, channel=0, programs=1)
    with pytest.raises(ValueError, match="ids must be contiguous"):
        w.ops.send_tokens(w.wire, w.peers[0], w.states[0], t.x, t.ids.short(), t.weights, channel=0, programs=1)
    with pytest.raises(ValueError, match="carries torch.float32"):
        w.ops.send_tokens(w.wire, w.peers[0], w.states[0], t.x.half(), t.ids, t.weights, channel=0, programs=1)
    with pytest.raises(ValueError, match="programs must be at least 1"):
        w.ops.send_tokens(w.wire, w.peers[0], w.states[0], t.x, t.ids, t.weights, channel=0, programs=0)
    slots = torch.zeros(15, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="an index with shares"):
        w.home(0, torch.zeros(15, 72), slots, index=slots)
    with pytest.raises(ValueError, match="y must have 15 rows"):
        w.home(0, torch.zeros(14, 72), slots)
    with pytest.raises(ValueError, match="slots must be contiguous"):
        w.home(0, torch.zeros(15, 72), slots[:14])
    assert not w.states[0].epoch.any() and not w.blocks(0).flags.any(), "nothing was launched"
