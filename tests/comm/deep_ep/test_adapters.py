"""The adapters over a stand-in for deep_ep, between real ranks: the library itself is not run here."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.comm.deep_ep import package
from rorqual.comm.deep_ep.elastic import ElasticDispatcher
from rorqual.comm.deep_ep.limits import check_elastic, check_low_latency, low_latency_bytes
from rorqual.comm.deep_ep.low_latency import LowLatencyDispatcher
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.fp8 import dequantise, quantise
from rorqual.launch.bench.comm.checks.party import answer, by_rank, trip
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.comm.deep_ep import fake
from tests.comm.routing import exact, magnitude, make_tokens
from tests.ranks import run_ranks

KINDS = ("random", "with_none", "all_to_one", "same_rank", "all_none")


def make_spec(world: int, **changes: Any) -> EPSpec:
    base = EPSpec(n_ranks=world, n_slots=4 * world, hidden=256, top_k=3, max_tokens=7, dtype="bfloat16")
    return replace(base, **changes)


def join() -> tuple[Grid, int]:
    return Grid.create(GridSpec(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"), 60.0), int(os.environ["RANK"])


def sent(spec: EPSpec, x: torch.Tensor) -> torch.Tensor:
    """x as it arrives."""
    return dequantise(*quantise(x, ue8m0=spec.payload == "fp8_ue8m0"), x.dtype) if spec.payload.startswith("fp8") else x


def near(out: torch.Tensor, spec: EPSpec, tokens: Any) -> bool:
    """Whether ``out`` is the fp64 result up to a few roundings to bf16."""
    x, ids, weights = tokens
    x = sent(spec, x)
    bound = 4 * 2.0**-8 * magnitude(x, ids, weights) + 1e-6
    return bool(((out.double() - exact(x, ids, weights)).abs() <= bound).all())


def elastic() -> int:
    grid, rank = join()
    done = 0
    for changes in ({}, {"payload": "fp8", "hidden": 512}, {"payload": "fp8_ue8m0", "hidden": 512}, {"alignment": 128}):
        spec = make_spec(grid.ep.size, **changes)
        dispatcher = ElasticDispatcher(grid.ep, spec, library=fake)
        assert dispatcher._buffer.fp8 == spec.payload.startswith("fp8")
        for seed, kind in enumerate(KINDS):
            n = (3 * rank + 4 * seed) % (spec.max_tokens + 1)
            tokens = make_tokens(rank, n, spec, kind, seed)
            for layout in ("contiguous", "masked", "rank"):
                out = trip(dispatcher, rank, tokens, layout)
                assert out.shape == (n, spec.hidden) and out.dtype == torch.bfloat16
                want = by_rank(replace(spec, deterministic=False), tokens)
                assert torch.equal(out, want), (changes, kind, layout)
                done += 1
            n_valid = torch.tensor([n // 2], dtype=torch.int32)
            out = trip(dispatcher, rank, tokens, "rank", n_valid=n_valid)
            assert torch.equal(out[: n // 2], want[: n // 2]) and not out[n // 2 :].any()
        if spec.payload == "fp8":
            x, ids, weights = make_tokens(rank, 5, spec, "random", 9)
            values, scales = quantise(x)
            routed = dispatcher.dispatch(values, ids, weights, scales=scales, layout="rank")
            assert routed.x.dtype == torch.float8_e4m3fn and routed.scales is not None
            y, index = answer(routed, spec, rank)
            assert torch.equal(dispatcher.combine(y, routed, index=index), by_rank(spec, (x, ids, weights)))
        routed = dispatcher.dispatch(*make_tokens(rank, 4, spec, "random", 3))
        assert routed.sources is not None and routed.host_counts() == routed.counts.tolist() and routed.epoch > 0
        buffer = dispatcher._buffer
        dispatcher.close()
        dispatcher.close()
        assert buffer.destroyed
        with pytest.raises(RuntimeError, match="deep_ep dispatcher is closed"):
            dispatcher.dispatch(*tokens)
    grid.close()
    return done


def test_elastic_gives_sums_of_ranks() -> None:
    assert run_ranks(elastic, 3, timeout=150.0) == [4 * len(KINDS) * 3] * 3


def low_latency() -> int:
    grid, rank = join()
    done = 0
    for changes in ({}, {"payload": "fp8"}, {"payload": "fp8_ue8m0", "alignment": 128}):
        spec = make_spec(grid.ep.size, hidden=2048, **changes)
        dispatcher = LowLatencyDispatcher(grid.ep, spec, library=fake)
        for seed, kind in enumerate(KINDS):
            n = (3 * rank + 4 * seed) % (spec.max_tokens + 1)
            tokens = make_tokens(rank, n, spec, kind, seed)
            outs = [trip(dispatcher, rank, tokens, layout) for layout in ("masked", "contiguous")]
            assert outs[0].shape == (n, spec.hidden) and outs[0].dtype == torch.bfloat16
            assert torch.equal(outs[0], outs[1]) and near(outs[0], spec, tokens), (changes, kind)
            done += 1
        first, second = (make_tokens(rank, 3, spec, "random", 20 + i) for i in range(2))
        tickets = [dispatcher.dispatch_send(*t) for t in (first, second)]
        with pytest.raises(RuntimeError, match="2 dispatches are on their way"):
            dispatcher.dispatch_send(*first)
        back = []
        for ticket in tickets[::-1]:
            routed = dispatcher.dispatch_recv(ticket, layout="masked")
            back.append(dispatcher.combine_recv(dispatcher.combine_send(answer(routed, spec, rank)[0], routed)))
        assert near(back[1], spec, first) and near(back[0], spec, second)
        with pytest.raises(ValueError, match="no weights: ask for"):
            dispatcher.dispatch(*first, layout="rank")
        dispatcher.close()
    grid.close()
    return done


def test_low_latency_gives_weighted_sums() -> None:
    assert run_ranks(low_latency, 2, timeout=150.0) == [3 * len(KINDS)] * 2


def masks() -> list[Any]:
    grid, rank = join()
    plain = LowLatencyDispatcher(grid.ep, make_spec(3, hidden=2048), library=fake)
    assert plain.active_mask() == [True] * 3
    with pytest.raises(ValueError, match="made without fault_tolerant"):
        plain.set_active([True, True, False])
    spec = make_spec(3, hidden=2048, fault_tolerant=True)
    dispatcher = LowLatencyDispatcher(grid.ep, spec, library=fake)
    dispatcher.set_active([True, False, True])
    assert dispatcher.active_mask() == [True, False, True]
    x, ids, weights = make_tokens(rank, 5, spec, "random", 1)
    out = trip(dispatcher, rank, (x, ids, weights), "masked")
    alive = torch.where(torch.div(ids, spec.slots_per_rank, rounding_mode="floor") == 1, -1, ids)
    good = near(out, spec, (x, alive, weights)) if rank != 1 else True
    dispatcher.set_active([True] * 3)
    again = near(trip(dispatcher, rank, (x, ids, weights), "masked"), spec, (x, ids, weights))
    grid.close()
    return [good, again, dispatcher.active_mask()]


def test_low_latency_masks_ranks() -> None:
    assert run_ranks(masks, 3, timeout=90.0) == [[True, True, [True] * 3]] * 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "carries and adds bfloat16, found EPSpec.dtype 'float32'"),
        ({"payload": "bytes"}, "no payload of plain bytes"),
        ({"hidden": 7296}, "a hidden of a multiple of 256, found 7296; pad it, or use symm"),
        ({"n_slots": 2304, "n_ranks": 12}, "at most 2048 slots, found 2304"),
        ({"n_slots": 600, "n_ranks": 2}, "at most 256 slots of a rank, found 300"),
    ],
)
def test_limits_of_elastic(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_elastic(make_spec(2, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 3584}, "low-latency kernels exist for hidden 2048, .*, 8192, found 3584"),
        ({"max_tokens": 512}, "at most 510 tokens a rank with queues of 1024 .*, found max_tokens 512; set NVSHMEM_QP_DEPTH=2048"),
        ({"depth": 3}, "2 result buffers, found EPSpec.depth 3"),
        ({"n_slots": 2048, "max_tokens": 500, "hidden": 8192},
         r"would have \d+\.\d\d GiB for 500 tokens x 2048 slots x 8192, and 32 are the most; .* may be \d+"),
        ({"dtype": "float16"}, "carries and adds bfloat16"),
    ],
)  # fmt: skip
def test_limits_of_low_latency(changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    with pytest.raises(ValueError, match=said):
        check_low_latency(make_spec(2, **{"hidden": 7168, **changes}))


def test_the_largest_batch_that_is_named_fits() -> None:
    spec = make_spec(2, n_slots=2048, max_tokens=500, hidden=8192)
    with pytest.raises(ValueError) as told:
        check_low_latency(spec)
    most = int(str(told.value).rsplit(" ", 1)[1])
    check_low_latency(replace(spec, max_tokens=most))
    with pytest.raises(ValueError, match="32 are the most"):
        check_low_latency(replace(spec, max_tokens=most + 1))
    assert low_latency_bytes(7168, 128, 256) / 2**30 == pytest.approx(1.78, abs=0.01)


def test_limits_of_choices() -> None:
    with pytest.raises(ValueError, match="deep_ep_ll backend takes at most 11 choices of a token, found top_k 12"):
        LowLatencyDispatcher(Group.solo(), make_spec(1, hidden=2048, top_k=12, n_slots=16), library=fake)
    with pytest.raises(ValueError, match="deep_ep backend takes at most 32 choices of a token, found top_k 33"):
        ElasticDispatcher(Group.solo(), make_spec(1, top_k=33, n_slots=64), library=fake)
    with pytest.raises(ValueError, match="deep_ep backend has no deterministic sums"):
        ElasticDispatcher(Group.solo(), make_spec(1, deterministic=True), library=fake)
    with pytest.raises(ValueError, match="needs a torch.distributed process group"):
        ElasticDispatcher(Group.solo(), make_spec(1), library=fake)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    for name in (package.ELASTIC, package.LOW_LATENCY):
        usable, why = package.explain(name)
        assert not usable and "deep_ep is not installed (pip install sgl-deep-ep" in why
    with pytest.raises(ValueError, match="backend 'deep_ep' needs deep_ep, which is not installed: pip install sgl-deep-ep"):
        ElasticDispatcher(Group.solo(), make_spec(1))


def test_a_package_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(package, "version", lambda: "1.2.3")

    def broken(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(package, "import_module", broken)
    with pytest.raises(ValueError, match=r"deep_ep 1\.2\.3 is installed but does not load \(ImportError: undefined symbol: _ZN3c10\)"):
        package.load(package.ELASTIC)
    monkeypatch.setattr(package, "import_module", lambda name: SimpleNamespace(Buffer=object))
    assert package.load(package.LOW_LATENCY).Buffer is object
    with pytest.raises(ValueError, match=r"deep_ep 1\.2\.3 has no ElasticBuffer, which backend 'deep_ep' is made of"):
        package.load(package.ELASTIC)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert package.explain(package.ELASTIC) == (False, "deep_ep needs a CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert package.explain(package.LOW_LATENCY)[0] and "only when named" in package.explain(package.LOW_LATENCY)[1]


def test_nothing_is_imported_with_the_package() -> None:
    assert "deep_ep" not in sys.modules and "nvshmem" not in sys.modules
