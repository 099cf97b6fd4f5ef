"""Attention over rows in three places equals, bit for bit, attention over rows in one."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from rorqual.attention.kv.tier import TierCounter
from rorqual.attention.ops import AttentionOps
from rorqual.attention.queries import Queries, make_queries
from rorqual.attention.rope import rotate, rotation
from tests.attention.common import SPARSE
from tests.attention.tiered import GLM, TOPK, Resident, Setting, Tiered, plan

HALF = {"dtype": "bfloat16", "compute": torch.bfloat16}
FP8 = {"dtype": "fp8"}


def run(setting: Setting) -> Tiered:
    """Both, step by step."""
    one, many = Resident(setting), Tiered(setting)
    for rows, counts in plan(setting):
        if setting.prefix and many.done[1] == 0 and many.done[0] >= setting.prefix:
            one.done[1] = many.done[1] = setting.prefix
        expected, got = one.step(rows, counts), many.step(rows, counts)
        assert got.isfinite().all(), (rows, counts)
        assert torch.equal(got, expected), (rows, counts, many.done)
        many.shake()
    assert many.counted(TierCounter.UNWRITTEN) == 0
    return many


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "seed"), [({}, 0), ({}, 1), (HALF, 2), (FP8, 3)])
def test_random_steps(fused, kind, seed):
    many = run(Setting(fused=fused, seed=seed, **kind))
    assert many.counted(TierCounter.HITS) and many.counted(TierCounter.MISSES)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_page_sizes(fused, page_size):
    run(Setting(fused=fused, page_size=page_size, seed=page_size, lengths=(60, 30, 90) if page_size > 4 else (30, 18), n_layers=2))


@pytest.mark.parametrize(("seed", "kind"), [(0, {}), (1, {"scored": True}), (2, FP8 | {"scored": True})])
def test_static_steps(seed, kind):
    run(Setting(fused=True, static=True, seed=seed, **kind))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_shared_prefix(fused, seed):
    run(Setting(fused=fused, prefix=20, seed=seed, config=SPARSE, n_layers=1))


@pytest.mark.parametrize("expanding", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_every_form_of_attention(expanding, fused, monkeypatch):
    """Keys expanded and masked, or fetched by row; prompts in few chunks, of which the first ones see every key."""
    monkeypatch.setattr("rorqual.attention.mla.expanding_pays", lambda *a: expanding)
    monkeypatch.setattr("rorqual.attention.mla.masking_pays", lambda config, group, *a: expanding and group.width > 1)
    monkeypatch.setattr("rorqual.attention.fused_forms.expanding_pays", lambda *a: expanding)
    run(Setting(fused=fused, seed=11, lengths=(25, 30, 8), n_layers=1, config=SPARSE, page_size=2))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("length", [7, 8, 9, 10])
def test_contexts_around_topk(fused, length):
    run(Setting(fused=fused, seed=length, lengths=(length, length + 1, length - 1), page_size=2))


def test_every_layer_of_glm_resolves_for_itself():
    many = run(Setting(config=GLM, fused=True, static=True, seed=9))
    assert (many.cache.hot.counters[:, TierCounter.MISSES] > 0).all()


class Recorder:
    """Counts joins, and the most forks between two."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.most = self.joins = 0

    @contextmanager
    def fork(self):
        self.waiting.append(None)
        self.most = max(self.most, len(self.waiting))
        yield

    def join(self) -> None:
        self.joins += 1
        self.waiting.clear()


def late(ops: AttentionOps) -> tuple[AttentionOps, Recorder]:
    """``ops`` whose fetches are made when they are joined."""
    pending: list = []

    class Late(Recorder):
        def join(self) -> None:
            assert self.waiting, "a join without a fork: no graph could hold it"
            for arguments in pending:
                ops.fetch_rows(*arguments)
            pending.clear()
            super().join()

    def fetch(*arguments) -> None:
        if beside.waiting:
            pending.append(arguments)
        else:
            ops.fetch_rows(*arguments)

    beside = Late()
    return dataclasses.replace(ops, beside=beside, fetch_rows=fetch), beside


@pytest.mark.parametrize(("static", "config"), [(False, GLM), (True, GLM), (True, SPARSE)])
def test_fetches_may_come_as_late_as_the_join(static, config, monkeypatch):
    ops, beside = late(AttentionOps.load("torch"))
    monkeypatch.setattr(AttentionOps, "load", lambda name: ops)
    monkeypatch.setattr("rorqual.attention.keys._BESIDE_FROM", 3)
    many = run(Setting(fused=True, static=static, seed=3, config=config))
    assert beside.joins and beside.most == 1 and many.counted(TierCounter.MISSES)


class LateQueries(Recorder):
    """Queries that are made in a fork are NaN until it is joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.inside = False
        monkeypatch.setattr("rorqual.attention.fused.make_queries", self.make)

    @contextmanager
    def fork(self):
        with super().fork():
            self.inside = True
            yield
            self.inside = False

    def make(self, *arguments, **more):
        found = make_queries(*arguments, **more)
        if not self.inside:
            return found
        assert found.latent is not None
        late = {name: torch.full_like(x, float("nan")) for name, x in vars(found).items()}
        self.pending += [(late[name], x) for name, x in vars(found).items()]
        return Queries(**late)

    def join(self) -> None:
        assert self.waiting, "a join without a fork: no graph could hold it"
        for target, x in self.pending:
            target.copy_(x)
        self.pending.clear()
        super().join()


@pytest.mark.parametrize(("static", "config"), [(False, GLM), (True, GLM), (True, SPARSE)])
def test_queries_may_come_as_late_as_the_join(static, config, monkeypatch):
    plain, aside = AttentionOps.load("torch"), LateQueries(monkeypatch)
    monkeypatch.setattr(AttentionOps, "load", lambda name: dataclasses.replace(plain, aside=aside))
    setting = Setting(fused=True, static=static, seed=3, config=config)
    many, joins = run(setting), aside.joins
    assert joins and aside.most == 1 and not aside.waiting and many.counted(TierCounter.MISSES)
    monkeypatch.setattr(AttentionOps, "load", lambda name: plain)
    apart, whole = Resident(setting), Resident(setting)
    for layer in apart.layers:
        layer.ops = dataclasses.replace(plain, aside=aside)
    for rows, counts in plan(setting):
        torch.testing.assert_close(apart.step(rows, counts), whole.step(rows, counts), rtol=1e-5, atol=1e-5)
    assert aside.joins > joins


def test_what_runs_beside_is_one_thing_a_step(monkeypatch):
    """Fetches beside the queries' products where a step has tokens enough for that, else queries beside the choice of keys."""
    plain = AttentionOps.load("torch")
    beside, aside = Recorder(), Recorder()
    monkeypatch.setattr(AttentionOps, "load", lambda name: dataclasses.replace(plain, beside=beside, aside=aside))
    monkeypatch.setattr("rorqual.attention.keys._BESIDE_FROM", 3)
    setting, seen = Setting(fused=True, seed=3, config=GLM), set()
    many = Tiered(setting)
    for rows, counts in plan(setting):
        before = beside.joins, aside.joins
        many.step(rows, counts)
        many.shake()
        found = beside.joins > before[0], aside.joins > before[1]
        assert found in (((False, False), (True, False)) if sum(counts) >= 3 else ((False, False), (False, True))), counts
        seen.add(found)
    assert len(seen) == 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fault", ["order", "stale", "shifted"])
def test_a_resolver_that_errs_is_caught(fused, fault, monkeypatch):
    """Rows in another order, no fetch, or rows of the neighbouring page do not go unnoticed."""
    right = AttentionOps.load("torch")

    def resolve(*arguments, **more):
        found = right.resolve_rows(*arguments, **more)
        if fault == "order":  # the same rows, given to the wrong tokens
            return dataclasses.replace(found, rows=found.rows.flip(0))
        if fault == "shifted":
            return dataclasses.replace(found, rows=torch.where(found.rows >= 0, found.rows ^ 1, -1))
        return dataclasses.replace(found, count=torch.zeros_like(found.count))

    wrong = dataclasses.replace(right, resolve_rows=resolve)
    monkeypatch.setattr(AttentionOps, "load", lambda name: wrong)
    monkeypatch.setattr("rorqual.attention.mla.twins", lambda: wrong)
    with pytest.raises((AssertionError, IndexError)):
        run(Setting(fused=fused, seed=1))


@pytest.mark.parametrize("fused", [False, True])
def test_equals_attention_written_out(fused):
    """The oracle of the others is this package's own attention; here it is the formulas, in fp64, over all tokens at once."""
    setting = Setting(config=SPARSE, n_layers=1, fused=fused, lengths=(30, 23), seed=5)
    many, parts = Tiered(setting), [[], []]
    for rows, counts in plan(setting):
        for r, part in zip(rows, many.step(rows, counts).split(counts), strict=True):
            parts[r].append(part)
        many.shake()
    assert many.counted(TierCounter.HITS) and many.counted(TierCounter.MISSES)
    for x, got in zip(many.x, parts, strict=True):
        expected = x.double() + written_out(many.layers[0], x)
        torch.testing.assert_close(torch.cat(got).double(), expected, atol=1e-5, rtol=1e-5)


def written_out(mla, x: torch.Tensor) -> torch.Tensor:
    """[T, hidden] fp64: every head's softmax over the keys of highest index score, keys expanded, nothing cached."""
    c, index, t = mla.config, mla.indexer, len(x)
    turn = rotation(c.rope, torch.arange(t))
    low = mla.q_a_layernorm(mla.q_a_proj(x))
    queries = mla.q_b_proj(low).view(t, c.n_heads, -1)
    latent, key = mla.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.rope_dim], -1)
    both = mla.kv_b_proj(mla.kv_a_layernorm(latent)).view(t, c.n_heads, -1).double()
    key = rotate(key, turn, interleaved=True).double()
    q_rope = rotate(queries[..., c.nope_dim :], turn, interleaved=True).double()
    scores = torch.einsum("thd,shd->ths", queries[..., : c.nope_dim].double(), both[..., : c.nope_dim])
    scores = (scores + torch.einsum("thd,sd->ths", q_rope, key)) * c.softmax_scale

    def turned(values: torch.Tensor) -> torch.Tensor:
        head = rotate(values[..., : c.rope_dim], turn, interleaved=False)
        return torch.cat((head, values[..., c.rope_dim :].float()), -1).double()

    index_keys = turned(torch.nn.functional.layer_norm(index.wk(x), (index.head_dim,), index.k_norm.weight, index.k_norm.bias, 1e-6))
    index_queries = turned(index.wq_b(low).view(t, index.n_heads, -1))
    each = torch.einsum("thd,sd->ths", index_queries, index_keys).relu()
    ranks = torch.einsum("ths,th->ts", each, index.weights_proj(x).double())
    future = torch.ones(t, t).triu(1).bool()
    kept = torch.zeros(t, t).bool().scatter_(1, ranks.masked_fill(future, -torch.inf).topk(min(TOPK, t), 1).indices, True) & ~future
    weights = torch.softmax(scores.masked_fill(~kept[:, None], -torch.inf), -1)
    heads = torch.einsum("ths,shv->thv", weights, both[..., c.nope_dim :])
    return torch.nn.functional.linear(heads.flatten(1), mla.o_proj.weight.double())
