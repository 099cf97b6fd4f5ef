from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.engine.sampling.bias_table import bias_rows, by_slot
from rorqual.engine.sampling.logprobs import gather_logprobs
from rorqual.engine.sampling.noise import uniform
from rorqual.engine.sampling.sampler import SampleResult, draw, sample
from rorqual.engine.sampling.sampler_table import SamplerTable, ban_rows, param_floats, param_ints
from rorqual.engine.sampling_params import SamplingParams

V = 97


class Bench:
    """Requests in slots, with everything ``sample`` wants."""

    def __init__(
        self, params: list[SamplingParams], tokens: list[list[int]], prompt_lens: list[int], *, eos: tuple[int, ...] = (), vocab: int = V
    ) -> None:
        self.n, self.vocab = len(params), vocab
        self.table = SamplerTable(self.n + 3, "cpu", debug=True)
        self.slots = torch.tensor([(5 * i + 2) % (self.n + 3) for i in range(self.n)]) if (self.n + 3) % 5 else torch.arange(self.n)
        width = max(map(len, tokens), default=1) + 4
        self.token_table = torch.full((self.n + 3, width), -1, dtype=torch.int32)  # -1: must never be read
        ints, floats, bans, biases = [], [], [], []
        for i, (p, ids, prompt_len) in enumerate(zip(params, tokens, prompt_lens, strict=True)):
            slot = int(self.slots[i])
            self.token_table[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            ints.append(param_ints(p, slot=slot, length=len(ids), prompt_len=prompt_len, seed=p.seed if p.seed is not None else 1000 + i))
            floats.append(param_floats(p))
            bans.extend(ban_rows(slot, prompt_len, p, eos))
            biases.extend(bias_rows(slot, p))
        self.lengths = torch.tensor([len(ids) for ids in tokens])
        self.table.set(
            np.array(ints, dtype=np.int64), np.array(floats), np.array(bans, dtype=np.int64).reshape(-1, 3), np.array(biases).reshape(-1, 3)
        )

    def run(self, logits: torch.Tensor, rows: list[int] | None = None, positions: torch.Tensor | None = None) -> SampleResult:
        pick = torch.arange(self.n) if rows is None else torch.tensor(rows, dtype=torch.int64)
        where = self.lengths if positions is None else positions
        return sample(logits[pick], self.slots[pick], where[pick], self.table, self.token_table, self.lengths[pick])


def slow_kept(logits: np.ndarray, p: SamplingParams) -> list[tuple[int, float]]:
    """(token, weight) that temperature, top-k, top-p and min-p leave, best first: written token by token."""
    scaled = [float(np.float32(x) / np.float32(p.temperature)) for x in logits]
    order = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    weights = {t: float(np.exp(np.float64(np.float32(scaled[t]) - np.float32(scaled[order[0]])))) for t in order}
    kept = order[: p.top_k] if p.top_k > 0 else order
    total = sum(weights[t] for t in kept)
    nucleus, mass = [], 0.0
    for t in kept:
        if p.top_p < 1 and mass >= p.top_p * total:
            break
        nucleus.append(t)
        mass += weights[t]
    return [(t, weights[t]) for t in nucleus if weights[t] >= p.min_p]


def slow_draw(logits: np.ndarray, p: SamplingParams, u: float) -> int:
    kept = slow_kept(logits, p)
    target, total = u * sum(w for _, w in kept), 0.0
    for token, weight in kept:
        total += weight
        if total > target:
            return token
    return kept[-1][0]


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=100000),
    SamplingParams(top_p=0.1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=20, top_p=0.7, min_p=0.05, temperature=1.3),
]


def test_truncation_and_draw_equal_the_slow_twin() -> None:
    rng = np.random.default_rng(0)
    for trial in range(20):
        params = PARAMS * 2
        bench = Bench(params, [[1]] * len(params), [1] * len(params))
        logits = torch.from_numpy(rng.normal(scale=3, size=(len(params), V)).astype(np.float32))
        if trial % 2:
            logits = logits.round()  # many ties
        positions = torch.full((len(params),), trial)
        found = bench.run(logits, positions=positions).tokens.tolist()
        noise = uniform(bench.table.seed[bench.slots], positions).tolist()
        assert found == [slow_draw(logits[i].numpy(), p, noise[i]) for i, p in enumerate(params)]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: str(p.to_wire()))
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    n, vocab = 20000, 12
    logits = torch.linspace(-1.5, 1.5, vocab).roll(5)
    kept = dict(slow_kept(logits.numpy(), params))
    noise = uniform(torch.full((n,), 3), torch.arange(n))
    column = {"dtype": torch.float64}
    drawn = draw(
        logits.expand(n, -1).contiguous(),
        noise,
        torch.full((n,), params.temperature, **column),
        torch.full((n,), params.top_k),
        torch.full((n,), params.top_p, **column),
        torch.full((n,), params.min_p, **column),
    )
    counts = np.bincount(drawn.numpy(), minlength=vocab)
    assert set(np.flatnonzero(counts)) <= set(kept)
    expected = {t: n * w / sum(kept.values()) for t, w in kept.items()}
    chi = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    assert chi < len(kept) - 1 + 5 * np.sqrt(2 * max(1, len(kept) - 1))


def test_plain_sampling_matches_torch_softmax() -> None:
    n = 30000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    bench = Bench([SamplingParams(temperature=0.8, seed=9)], [[1]], [1], vocab=40)
    positions = torch.arange(n)
    slots = bench.slots.expand(n)
    lengths = torch.ones(n, dtype=torch.int64)
    drawn = sample(logits.expand(n, -1).contiguous(), slots, positions, bench.table, bench.token_table, lengths).tokens
    expected = torch.softmax(logits[0].double() / 0.8, -1) * n
    counts = torch.bincount(drawn, minlength=40)
    assert float(((counts - expected) ** 2 / expected).sum()) < 39 + 5 * np.sqrt(2 * 39)


def test_a_row_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(2)
    params = [PARAMS[i % len(PARAMS)] if i % 5 else SamplingParams(temperature=0, repetition_penalty=1.3) for i in range(64)]
    params[7] = SamplingParams(temperature=1.4, presence_penalty=1.0, logprobs=4)
    vocab = 1031
    tokens = [rng.integers(0, vocab, size=int(rng.integers(2, 40))).tolist() for _ in params]
    bench = Bench(params, tokens, [max(1, len(t) // 2) for t in tokens], vocab=vocab)
    logits = torch.from_numpy(rng.normal(scale=4, size=(64, vocab)).astype(np.float32))
    together = bench.run(logits)
    for row in range(64):
        alone = bench.run(logits, [row])
        assert alone.tokens.item() == together.tokens[row].item()
        if alone.logprobs is not None:
            assert together.logprobs is not None
            assert torch.equal(alone.logprobs.logprob[0], together.logprobs.logprob[row])
    order = list(reversed(range(64)))
    assert bench.run(logits, order).tokens.tolist() == together.tokens.flip(0).tolist()


def test_the_draw_depends_on_seed_and_position_only() -> None:
    params = [SamplingParams(seed=11), SamplingParams(seed=11), SamplingParams(seed=12)]
    bench = Bench(params, [[1]] * 3, [1] * 3)
    logits = torch.zeros(3, V)
    tokens = torch.stack([bench.run(logits, positions=torch.full((3,), p)).tokens for p in range(40)])
    assert torch.equal(tokens[:, 0], tokens[:, 1])
    assert not torch.equal(tokens[:, 0], tokens[:, 2]) and len(set(tokens[:, 0].tolist())) > 10


def slow_penalise(logits: np.ndarray, ids: list[int], prompt_len: int, p: SamplingParams) -> np.ndarray:
    out = logits.astype(np.float32).copy()
    for token in set(ids):
        out[token] = out[token] / np.float32(p.repetition_penalty) if out[token] > 0 else out[token] * np.float32(p.repetition_penalty)
    generated = ids[prompt_len:]
    for token in set(generated):
        out[token] = out[token] - np.float32(p.frequency_penalty) * np.float32(generated.count(token)) - np.float32(p.presence_penalty)
    return out


def test_penalties_equal_the_slow_twin() -> None:
    rng = np.random.default_rng(3)
    params, tokens, prompts = [], [], []
    for i in range(48):
        presence, frequency = (float(np.round(x, 2)) for x in rng.uniform(-2, 2, 2))
        params.append(
            SamplingParams(
                temperature=0,
                presence_penalty=presence if i % 2 else 0,
                frequency_penalty=frequency if i % 3 else 0,
                repetition_penalty=float(np.round(rng.uniform(0.3, 2.5), 2)) if i % 5 else 1.0,
            )
        )
        tokens.append(rng.integers(0, 12, size=int(rng.integers(1, 30))).tolist())
        prompts.append(int(rng.integers(1, len(tokens[-1]) + 1)))
    bench = Bench(params, tokens, prompts)
    changed = 0
    for _ in range(10):
        logits = rng.normal(scale=1.0, size=(48, V)).astype(np.float32)
        logits[:, :12] += 2.0
        want = [int(np.argmax(slow_penalise(logits[i], tokens[i], prompts[i], p))) for i, p in enumerate(params)]
        assert bench.run(torch.from_numpy(logits)).tokens.tolist() == want
        changed += int((np.array(want) != logits.argmax(1)).sum())
    assert changed > 50  # the penalties did matter


def test_penalties_respect_the_host_bound_on_lengths() -> None:
    bench = Bench([SamplingParams(temperature=0, presence_penalty=2.0)], [[3, 5, 5]], [1])
    logits = torch.zeros(1, V)
    logits[0, 5], logits[0, 6] = 1.0, 0.5
    args = (logits, bench.slots, bench.lengths, bench.table, bench.token_table, bench.lengths)
    assert sample(*args, max_length=3).tokens.tolist() == [6]
    assert sample(*args, max_length=1 << 20, host_slots=bench.slots.numpy()).tokens.tolist() == [6]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    for vocab in (7, 64, 1000, 4099):
        bench = Bench([SamplingParams(temperature=0)] * 4, [[1]] * 4, [1] * 4, vocab=vocab)
        logits = torch.zeros(4, vocab)
        logits[1, [3, 5, vocab - 1]] = 2.0
        logits[2, [vocab - 2, vocab - 1]] = 1.0
        logits[3] = -1.0
        assert bench.run(logits).tokens.tolist() == [0, 3, vocab - 2, 0]


def test_all_greedy_batches_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([SamplingParams(temperature=0)] * 2 + [SamplingParams()], [[1]] * 3, [1] * 3)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not on the short way")

    for name in ("sort", "topk", "softmax", "cumsum"):
        monkeypatch.setattr(torch, name, refuse)
    logits = torch.randn(3, V)
    assert bench.run(logits, [0, 1]).tokens.tolist() == logits[:2].argmax(1).tolist()
    with pytest.raises(AssertionError, match="short way"):
        bench.run(logits)


def test_min_tokens_bans_end_and_stop_tokens_until_the_length() -> None:
    first = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[8, 9])
    params = [first, SamplingParams(temperature=0), SamplingParams(min_tokens=1)]
    bench = Bench(params, [[1, 2, 3]] * 3, [2, 2, 3], eos=(4,))
    logits = torch.zeros(3, V)
    logits[:, 4], logits[:, 8], logits[:, 9], logits[:, 50] = 90.0, 80.0, 70.0, 60.0
    assert bench.run(logits).tokens.tolist() == [50, 4, 8]  # rows 0 and 2 have one token less than they must; 8 ends only row 0
    assert logits[0, 4] == 90.0  # the caller's logits are left alone
    bench.lengths = torch.tensor([4, 4, 4])
    assert bench.run(logits).tokens.tolist() == [4, 4, 4]


def test_a_slot_loses_the_bans_of_its_last_request() -> None:
    bench = Bench([SamplingParams(temperature=0, min_tokens=5, max_tokens=9)], [[1]], [1], eos=(4, 6))
    logits = torch.zeros(1, V)
    logits[0, 4] = 5.0
    assert bench.run(logits).tokens.item() != 4
    slot = int(bench.slots[0])
    params = SamplingParams(temperature=0)
    ints = np.array([param_ints(params, slot=slot, length=1, prompt_len=1, seed=0)], dtype=np.int64)
    bench.table.set(ints, np.array([param_floats(params)]))
    assert bench.run(logits).tokens.item() == 4
    one_ban = np.array([(slot, 9, 4)], dtype=np.int64)
    bench.table.set(ints, np.array([param_floats(params)]), one_ban)
    assert bench.run(logits).tokens.item() == 0
    logits[0, 6] = 4.0
    assert bench.run(logits).tokens.item() == 6  # of the first request's two bans nothing is left


def test_logit_bias_is_added_before_penalties_and_temperature() -> None:
    rng = np.random.default_rng(5)
    params = [
        SamplingParams(logit_bias={3: 4.0, 90: -7.5}, temperature=0.7),
        SamplingParams(temperature=0),
        SamplingParams(logit_bias={t: float(t % 9) for t in range(60)}, repetition_penalty=1.7, temperature=0),
        SamplingParams(logit_bias={96: 100.0}, temperature=0, logprobs=1),
        SamplingParams(logit_bias={2: -100.0}, top_k=3),
    ]
    seen = [[1, 2], [4, 5], [8, 17, 17], [1], [2]]
    bench = Bench(params, seen, [1, 1, 1, 1, 1])
    plain = Bench([SamplingParams(**{**p.to_wire(), "logit_bias": None}) for p in params], seen, [1, 1, 1, 1, 1])
    for trial in range(20):
        logits = torch.from_numpy(rng.normal(scale=3, size=(len(params), V)).astype(np.float32))
        biased = logits.clone()
        for row, p in enumerate(params):
            for token, value in p.biases:
                biased[row, token] += value
        where = torch.full((len(params),), trial)
        found, raw = bench.run(logits, positions=where), logits.clone()
        assert torch.equal(logits, raw)
        assert found.tokens.tolist() == plain.run(biased, positions=where).tokens.tolist()
        assert found.logprobs is not None and found.tokens[3] == 96
        assert torch.equal(found.logprobs.logprob, torch.log_softmax(logits, -1).gather(1, found.tokens.unsqueeze(1)).squeeze(1))


def test_a_slot_loses_the_bias_of_its_last_request() -> None:
    params = [SamplingParams(temperature=0, logit_bias={4: 50.0, 5: 49.0}), SamplingParams(temperature=0, logit_bias={7: 9.0})]
    bench = Bench(params, [[1], [1]], [1, 1])
    logits = torch.zeros(2, V)
    assert bench.run(logits).tokens.tolist() == [4, 7]
    slot = int(bench.slots[0])
    ints = np.array([param_ints(SamplingParams(temperature=0), slot=slot, length=1, prompt_len=1, seed=0)], dtype=np.int64)
    floats = np.array([param_floats(SamplingParams(temperature=0))])
    bench.table.set(ints, floats)
    assert bench.run(logits).tokens.tolist() == [0, 7]  # the other row's bias still holds, and nothing of the first's
    bench.table.set(ints, floats, new_biases=np.array([(slot, 5, 1.0)]))
    assert bench.run(logits).tokens.tolist() == [5, 7]


def test_logit_bias_does_not_lift_a_ban() -> None:
    bench = Bench([SamplingParams(temperature=0, min_tokens=2, logit_bias={4: 100.0, 6: 1.0})], [[1]], [1], eos=(4,))
    assert bench.run(torch.zeros(1, V)).tokens.tolist() == [6]


def test_logprobs_are_of_the_raw_logits() -> None:
    params = [
        SamplingParams(temperature=0, logprobs=3, presence_penalty=2.0),
        SamplingParams(temperature=0.5, logprobs=0),
        SamplingParams(),
    ]
    bench = Bench(params, [[1, 2]] * 3, [1] * 3)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(4)).round(decimals=1)  # with ties
    result = bench.run(logits)
    assert result.logprobs is not None
    sampled, rank, top_ids, top = result.logprobs
    want = torch.log_softmax(logits, -1)
    assert torch.equal(sampled, want.gather(1, result.tokens[:, None])[:, 0])
    order = torch.sort(logits, descending=True, stable=True).indices
    assert torch.equal(top_ids, order[:, :3]) and torch.equal(top, want.gather(1, order[:, :3]))
    assert [int((order[i] == result.tokens[i]).nonzero()) + 1 for i in range(3)] == rank.tolist()
    assert bench.run(logits, [2]).logprobs is None
    narrow = bench.run(logits, [1, 2]).logprobs
    assert narrow is not None and narrow.top_ids.shape == (2, 0)


def test_gather_logprobs_orders_ties_and_zeros() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, 0.0, -torch.inf, 3.5, -2.0]])
    found = gather_logprobs(logits, torch.tensor([1]), 99)
    assert found.top_ids.tolist() == [[5, 0, 1, 3, 2, 6, 4]] and found.rank.tolist() == [3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_are_named_in_debug_mode(bad: float) -> None:
    bench = Bench([SamplingParams(temperature=0)] * 3, [[1]] * 3, [1] * 3)
    logits = torch.zeros(3, V)
    logits[0, 1] = -torch.inf  # a masked token is no error
    bench.run(logits)
    logits[1, 8] = bad
    with pytest.raises(FloatingPointError) as error:
        bench.run(logits)
    slot = int(bench.slots[1])
    assert str(error.value) == f"logits are NaN or +inf in 1 of 3 sampled rows: rows [1], request slots [{slot}]"
    bench.table.debug = False
    bench.run(logits)


def test_debug_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    assert SamplerTable(1, "cpu").debug
    monkeypatch.setenv("RORQUAL_DEBUG", "0")
    assert not SamplerTable(1, "cpu").debug


def test_no_rows() -> None:
    bench = Bench([SamplingParams()], [[1]], [1])
    assert bench.run(torch.zeros(1, V), []).tokens.shape == (0,)


def test_masked_tokens_are_never_drawn() -> None:
    n = 2000
    logits = torch.full((n, V), -torch.inf)
    logits[:, 40], logits[:, 41] = 0.0, -30.0
    column = torch.ones(n, dtype=torch.float64)
    drawn = draw(logits, torch.rand(n, dtype=torch.float64), column, torch.full((n,), -1), column, column * 0)
    assert set(drawn.tolist()) <= {40, 41}
    edge = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits[:2], edge, column[:2], torch.full((2,), -1), column[:2], column[:2] * 0).tolist() == [40, 41]


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    params = PARAMS[:8]
    bench = Bench(params, [[1]] * 8, [1] * 8)
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(5)) * 3
    whole = bench.run(logits).tokens
    monkeypatch.setattr("rorqual.engine.sampling.sampler._BLOCK_ELEMENTS", 3 * V)
    assert torch.equal(bench.run(logits).tokens, whole)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 20.0])
def test_ordering_the_likeliest_first_changes_nothing(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    params = [*PARAMS, SamplingParams(top_k=9), SamplingParams(top_k=40), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5)] * 8
    vocab = 400
    bench = Bench(params, [[1]] * len(params), [1] * len(params), vocab=vocab)
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(6)) * scale
    for rounded in (logits, (logits * 4).round() / 4):
        found = []
        for prefix in (1 << 20, 8, 64, 199):  # the first orders everything at once
            monkeypatch.setattr("rorqual.engine.sampling.sampler._PREFIX", prefix)
            found.append(bench.run(rounded).tokens.tolist())
        assert found[0] == found[1] == found[2] == found[3]
        noise = uniform(bench.table.seed[bench.slots], bench.lengths).tolist()
        assert found[0] == [slow_draw(rounded[i].numpy(), p, noise[i]) for i, p in enumerate(params)]


def test_rows_by_slot():
    rows = np.array([[3, 1, 7], [0, 2, 8], [3, 0, 9], [1, 5, 5], [0, 1, 1]])
    found = {slot: group.tolist() for slot, group in by_slot(rows).items()}
    assert found == {3: [[3, 1, 7], [3, 0, 9]], 0: [[0, 2, 8], [0, 1, 1]], 1: [[1, 5, 5]]}
    assert by_slot(rows[:0]) == {} and {slot: len(group) for slot, group in by_slot(rows[:1]).items()} == {3: 1}
