"""MLA over ragged paged batches: one answer whatever the chunks, pages, forms, neighbours, and shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rorqual.attention import mla as mla_module
from rorqual.attention import sparse, tiles
from tests.attention.common import DENSE, SPARSE, Paged, make_mla

LENGTHS = [1, 3, 8, 9, 20, 41]
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


def whole(config, **kind):
    return Paged(config, LENGTHS, **kind).run(make_mla(config), 100)


def check(config, outputs, **kind):
    for got, expected in zip(outputs, whole(config, **kind), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("config", [DENSE, SPARSE])
@pytest.mark.parametrize("chunk,page_size", [(1, 1), (1, 64), (2, 4), (7, 16), (100, 1)])
def test_chunks_and_pages_do_not_matter(config, chunk, page_size):
    check(config, Paged(config, LENGTHS, page_size=page_size).run(make_mla(config), chunk))


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_prefill_and_decode_mix_and_requests_come_and_go(config):
    paged, mla, pieces = Paged(config, LENGTHS), make_mla(config), [[] for _ in LENGTHS]
    plans = [([4, 5], [19, 20]), ([0, 4, 5, 2], [1, 1, 1, 5]), ([5, 3, 2], [20, 1, 1]), ([1, 3, 2], [3, 8, 0]), ([2], [2])]
    for rows, counts in plans:
        out, _ = paged.step(mla, rows, counts)
        for r, part in zip(rows, out, strict=True):
            pieces[r].append(part)
    assert paged.done.tolist() == LENGTHS
    check(config, [torch.cat(p) for p in pieces])


@pytest.mark.parametrize("config", [DENSE, SPARSE])
@pytest.mark.parametrize("expanding,masking", [(True, True), (False, False)])
@pytest.mark.parametrize("chunk", [1, 6, 100])
def test_all_forms_agree(config, expanding, masking, chunk, monkeypatch):
    expected = whole(config)
    monkeypatch.setattr(mla_module, "expanding_pays", lambda *a: expanding)
    monkeypatch.setattr(mla_module, "masking_pays", lambda *a: masking)
    for got, want in zip(Paged(config, LENGTHS).run(make_mla(config), chunk), expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("config", [DENSE, SPARSE])
@pytest.mark.parametrize("masking", [True, False])
def test_small_budgets_change_nothing(config, masking, monkeypatch):
    expected = whole(config)
    monkeypatch.setattr(tiles, "ELEMENT_BUDGET", 300)
    monkeypatch.setattr(tiles, "_CACHED_KEYS", 10)
    monkeypatch.setattr(sparse, "ELEMENT_BUDGET", 300)
    monkeypatch.setattr("rorqual.attention.dense._HEAD_BUDGET", 100)
    monkeypatch.setattr("rorqual.attention.batch._ROW_TABLE", 1)
    monkeypatch.setattr(mla_module, "masking_pays", lambda *a: masking)
    for got, want in zip(Paged(config, LENGTHS).run(make_mla(config), 100), expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_both_cost_decisions_are_taken_both_ways(monkeypatch):
    taken = set()
    for name in ("expanding_pays", "masking_pays"):
        real = getattr(mla_module, name)

        def spy(*args, name=name, real=real):
            answer = real(*args)
            taken.add((name, bool(answer)))
            return answer

        monkeypatch.setattr(mla_module, name, spy)
    wide = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, topk=64))
    for config, length, chunk in ((DENSE, 8, 1), (DENSE, 200, 200), (SPARSE, 600, 600), (wide, 100, 100)):
        Paged(config, [length]).run(make_mla(config), chunk)
    assert taken == {(n, a) for n in ("expanding_pays", "masking_pays") for a in (True, False)}


def test_no_more_keys_than_topk_means_dense():
    wide = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, topk=41))
    sparse_mla, dense_mla = make_mla(wide), make_mla(DENSE)
    dense_mla.load_state_dict(sparse_mla.state_dict(), strict=False)
    paged = Paged(wide, LENGTHS)
    out, topk = paged.step(sparse_mla, list(range(6)), LENGTHS)
    assert topk is None
    written = paged.cache.layers[0].index.read(paged.batch([5], [0]).pages.rows(torch.tensor([0]), torch.arange(41)[None]))
    assert written.isfinite().all()  # index keys are written although nothing was selected
    for got, want in zip(out, Paged(DENSE, LENGTHS).run(dense_mla, 100), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_selection_is_ascending_visible_and_padded():
    paged = Paged(SPARSE, LENGTHS)
    _, topk = paged.step(make_mla(SPARSE), list(range(6)), LENGTHS)
    for rows in topk:
        for position, row in enumerate(rows.tolist()):
            kept = [p for p in row if p >= 0]
            assert len(row) == 8 and row == sorted(set(kept)) + [-1] * (8 - len(kept))
            assert len(kept) == min(8, position + 1) and max(kept) <= position


@pytest.mark.parametrize("chunk", [1, 41])
@pytest.mark.parametrize("masking", [True, False])
def test_rows_that_were_not_selected_may_hold_nan(chunk, masking, monkeypatch):
    monkeypatch.setattr(mla_module, "masking_pays", lambda *a: masking)
    mla, clean, dirty = make_mla(SPARSE), Paged(SPARSE, [42]), Paged(SPARSE, [42])
    for paged in (clean, dirty):
        paged.step(mla, [0], [42 - chunk])
    (expected,), (selected,) = clean.step(mla, [0], [chunk])
    unused = torch.ones(42, dtype=torch.bool)
    unused[selected[selected >= 0]] = False
    unused[42 - chunk :] = False  # the step itself writes these
    rows = dirty.batch([0], [0]).pages.rows(torch.tensor([0]), torch.arange(42)[None])[0]
    dirty.cache.layers[0].latent.rows[rows[unused]] = float("nan")
    assert chunk == 41 or unused.sum() > 20
    (got,), _ = dirty.step(mla, [0], [chunk])
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("config", [DENSE, SPARSE])
@pytest.mark.parametrize("expanding", [True, False])
def test_nan_stays_with_its_request_and_after_its_token(config, expanding, monkeypatch):
    monkeypatch.setattr(mla_module, "expanding_pays", lambda *a: expanding)
    expected = whole(config)
    paged = Paged(config, LENGTHS)
    paged.x[4][15:] = float("nan")
    paged.x[2][7] = float("nan")
    got = paged.run(make_mla(config), 100)
    for r in (0, 1, 3, 5):
        torch.testing.assert_close(got[r], expected[r], **CLOSE)
    torch.testing.assert_close(got[4][:15], expected[4][:15], **CLOSE)
    torch.testing.assert_close(got[2][:7], expected[2][:7], **CLOSE)
    assert got[4][15:].isnan().all() and got[2][7].isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_no_tokens(dtype):
    for config in (DENSE, SPARSE):
        paged, mla = Paged(config, [3, 30], dtype=dtype), make_mla(config)
        for rows, counts in (([], []), ([0, 1], [0, 0])):
            batch = paged.batch(rows, counts)
            out, topk = mla(torch.empty(0, config.hidden), batch, paged.cache.layers[0], None)
            assert out.shape == (0, config.hidden) and topk is None
        paged.step(mla, [1], [29])
        out, topk = mla(torch.empty(0, config.hidden), paged.batch([0, 1], [0, 0]), paged.cache.layers[0], None)
        assert out.shape == (0, config.hidden) and topk is None


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_shards_of_heads_add_up(config):
    full = make_mla(config)
    total = None
    for heads in ([0], [1, 2, 3]):
        part = make_mla(config)
        for name, rows in (("q_b_proj", 20), ("kv_b_proj", 22)):
            weight = getattr(full, name).weight.view(4, rows, -1)[heads].flatten(0, 1)
            getattr(part, name).weight = torch.nn.Parameter(weight)
        part.o_proj.weight = torch.nn.Parameter(full.o_proj.weight.view(config.hidden, 4, 10)[:, heads].flatten(1))
        out = Paged(config, LENGTHS).run(part, 100)
        total = out if total is None else [a + b for a, b in zip(total, out, strict=True)]
    check(config, total)


def test_weights_loaded_later_are_used():
    mla, other = make_mla(DENSE), make_mla(DENSE, seed=9)
    Paged(DENSE, LENGTHS).run(mla, 5)
    mla.load_state_dict(other.state_dict())
    for got, want in zip(Paged(DENSE, LENGTHS).run(mla, 5), Paged(DENSE, LENGTHS).run(other, 5), strict=True):
        assert torch.equal(got, want)


def close_enough(got, expected, share: float) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.isfinite().all() and float((a.float() - b).norm() / b.norm()) < share


@pytest.mark.parametrize("chunk", [7, 100])
def test_bf16_and_fp8_stay_near_fp32(chunk):
    wide = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, topk=30))
    for config in (DENSE, wide):
        expected = whole(config)
        half = make_mla(config, dtype=torch.bfloat16)
        close_enough(Paged(config, LENGTHS, dtype="bfloat16", compute=torch.bfloat16).run(half, chunk), expected, 0.05)
        close_enough(Paged(config, LENGTHS, dtype="bfloat16").run(make_mla(config), chunk), expected, 0.02)
        close_enough(Paged(config, LENGTHS, dtype="fp8").run(make_mla(config), chunk), expected, 0.08)
        close_enough(Paged(config, LENGTHS, dtype="fp8", compute=torch.bfloat16).run(half, chunk), expected, 0.1)


def test_fp8_index_keys_keep_most_of_the_selection():
    kept = total = 0
    for dtype in ("bfloat16", "fp8"):
        exact, _ = Paged(SPARSE, [200]), None
        rough = Paged(SPARSE, [200], dtype=dtype)
        mla = make_mla(SPARSE)
        a, b = exact.step(mla, [0], [200])[1][0], rough.step(mla, [0], [200])[1][0]
        kept += sum(len(set(x) & set(y) - {-1}) for x, y in zip(a.tolist(), b.tolist(), strict=True))
        total += int((a >= 0).sum())
    assert kept / total > 0.95


def test_hadamard_alone_changes_no_selection():
    plain, turned = Paged(SPARSE, [60]), Paged(SPARSE, [60])
    turned.cache.layers[0] = dataclasses.replace(turned.cache.layers[0], rotate_index=True)
    mla = make_mla(SPARSE)
    assert torch.equal(plain.step(mla, [0], [60])[1][0], turned.step(mla, [0], [60])[1][0])


def test_scores_equal_their_definition():
    mla, paged = make_mla(SPARSE), Paged(SPARSE, [30])
    batch, cache = paged.batch([0], [30]), paged.cache.layers[0]
    indexer, x = mla.indexer, paged.x[0]
    with torch.inference_mode():
        mla(x, batch, cache, None)
        turn = mla_module.rotation(SPARSE.rope, batch.positions)
        q = indexer._rotated(indexer.wq_b(mla.q_a_layernorm(mla.q_a_proj(x))).view(30, 16, 16), turn, cache)
        w = indexer.weights_proj(x)
        keys = cache.index.read(batch.write_rows)
        (chunk,) = batch.groups[0].chunks(pair_cost=16, key_cost=16)
        got = indexer._scores(q * 16**-0.5, w * 16**-0.5, chunk, cache)
    expected = torch.einsum("th,ths->ts", w.double(), torch.einsum("thd,sd->ths", q.double(), keys.double()).relu()) / 16
    torch.testing.assert_close(got[:30].double(), expected, atol=1e-6, rtol=1e-5)
    assert (expected < 0).any() and (expected > 0).any()


def test_indexer_norm_and_head_weights_are_fp32_in_a_bf16_model():
    indexer = make_mla(SPARSE, dtype=torch.bfloat16).indexer
    dtypes = {name: p.dtype for name, p in indexer.named_parameters()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"k_norm.weight", "k_norm.bias", "weights_proj.weight"}
