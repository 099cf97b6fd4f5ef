import numpy as np
import pytest

from rorqual.moe.eplb.locality.routing import Gate, Routing, count, fit_router, make_router


def plain_choice(gate, scores):
    """The gate for one token, in plain words."""
    size = gate.n_experts // gate.n_groups
    groups = [scores[g * size : (g + 1) * size] for g in range(gate.n_groups)]
    kept = sorted(range(gate.n_groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[: gate.topk_groups]
    allowed = [e for e in range(gate.n_experts) if e // size in kept]
    return set(sorted(allowed, key=lambda e: -scores[e])[: gate.top_k])


@pytest.mark.parametrize(
    "gate", [Gate(), Gate(n_experts=24, top_k=3, n_groups=4, topk_groups=2), Gate(n_experts=20, top_k=4, n_groups=1, topk_groups=1)]
)
def test_gate_chooses_as_described(gate):
    scores = np.random.default_rng(0).random((50, gate.n_experts), dtype=np.float32) - 0.5  # a bias may make scores negative
    for chosen, row in zip(gate.choose(scores), scores, strict=True):
        assert set(chosen.tolist()) == plain_choice(gate, row)


def test_tokens_keep_to_their_groups():
    routing = make_router(n_layers=2).sample(500)
    assert routing.ids.shape == (2, 500, 8)
    assert (np.sort(routing.ids, 2)[..., 1:] != np.sort(routing.ids, 2)[..., :-1]).all()
    groups = np.sort(routing.ids // 32, axis=2)
    assert ((groups[..., 1:] != groups[..., :-1]).sum(2) + 1).max() == 4


def test_skew_is_that_of_published_loads():
    """DeepSeek-R1 on 32 ranks: expert CV 1.28 and (max - mean) / mean 10.95, rank CV 0.48 and 1.56; here within a fifth."""
    load = make_router(n_layers=10, seed=3).sample(3072, seed=4).load
    ranks = load.reshape(len(load), 32, -1).sum(2)
    for values, cv, excess in ((load, 1.282, 10.95), (ranks, 0.480, 1.564)):
        mean = values.mean(1)
        assert (values.std(1) / mean).mean() == pytest.approx(cv, rel=0.2)
        assert (values.max(1) / mean - 1).mean() == pytest.approx(excess, rel=0.2)


def test_topics_are_what_makes_experts_go_together():
    def excess(topics):
        """How much more often than by chance the experts of a group's pairs meet, spread over pairs."""
        routing = make_router(
            n_layers=1, topics=topics, sigma=0.3, topic_sigma=1.5, gate=Gate(n_experts=16, top_k=2, n_groups=1, topk_groups=1)
        ).sample(6000)
        pairs = np.zeros((16, 16))
        np.add.at(pairs, (routing.ids[0, :, 0], routing.ids[0, :, 1]), 1)
        pairs, chosen = pairs + pairs.T, routing.load[0]
        return np.std((pairs / np.outer(chosen, chosen) * 6000)[~np.eye(16, dtype=bool)])

    assert excess(4) > 2 * excess(1)


def test_fitted_router_loads_experts_as_measured():
    load = make_router(n_layers=2, seed=5).sample(3000).load
    drawn = fit_router(load).sample(3000, seed=6).load
    for wanted, got in zip(load, drawn, strict=True):
        assert np.corrcoef(np.log(wanted + 4), np.log(got + 4))[0, 1] > 0.95
        assert np.abs(got - wanted).sum() / wanted.sum() < 0.25


def test_same_seed_same_tokens():
    assert (make_router(n_layers=1, seed=7).sample(64, seed=1).ids == make_router(n_layers=1, seed=7).sample(64, seed=1).ids).all()
    assert (make_router(n_layers=1, seed=7).sample(64, seed=1).ids != make_router(n_layers=1, seed=8).sample(64, seed=1).ids).any()


def test_choices_that_are_none_are_not_counted():
    assert count(np.array([[[0, 2, -1], [2, -1, -1]]]), 3).tolist() == [[1.0, 0.0, 2.0]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gate(n_experts=10, n_groups=4), "groups must divide"),
        (lambda: Gate(topk_groups=9), "1 to all of them"),
        (lambda: Gate(n_experts=16, n_groups=8, topk_groups=1, top_k=3), "too many"),
        (lambda: Routing(ids=np.zeros((2, 3), dtype=np.int64), n_experts=4), r"\[layers, tokens, top_k\]"),
        (lambda: Routing(ids=np.full((1, 1, 1), 4), n_experts=4), "experts 0 to 3"),
        (lambda: make_router(n_layers=1, topics=0), "topics must be 1 or more"),
        (lambda: fit_router(np.ones((1, 5))), "256 experts of the gate"),
    ],
)
def test_what_does_not_fit_is_said(make, said):
    with pytest.raises(ValueError, match=said):
        make()
