"""A step in two halves gives the hidden states of the whole step: cut anywhere, padded, on both paths of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rorqual import LLM
from rorqual.attention.batch import AttentionBatch
from rorqual.attention.halves import build_halves, static_halves
from rorqual.attention.ops import AttentionOps
from rorqual.engine.models.two_batches import run_halves
from rorqual.moe.ops import MoEOps
from tests.checkpoints import checkpoint

SIZE, WIDTH = 4, 12  # of a page; pages of a request


def pages(n: int) -> torch.Tensor:
    return torch.arange(1, n * WIDTH + 1, dtype=torch.int32).view(n, WIDTH)


@pytest.fixture
def engine():
    args = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "page_size": SIZE, "max_total_tokens": 1024}
    with LLM(str(checkpoint("v32")), max_num_seqs=8, **args) as llm:
        yield llm.engine


def run(engine: Any, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    with torch.inference_mode():
        out, _ = engine.stage.model(x, batch, engine.runner.cache)
    return out


STEPS = [
    ([0, 0, 0], [5, 1, 4]),  # the cut is inside the last request: 5 and 5 tokens
    ([5, 1, 4], [1, 1, 31]),  # one token, one token, and a chunk cut in the middle, which selects keys
    ([6, 2, 35], [1, 1, 1]),
    ([7, 3, 36], [2, 0, 0]),
]


def test_ragged_steps(engine):
    table, generator = pages(3), torch.Generator().manual_seed(0)
    for starts, counts in STEPS:
        s, c = np.array(starts), np.array(counts)
        x = torch.randn(sum(counts), 128, generator=generator)
        whole = run(engine, x, AttentionBatch.build(s, c, table, SIZE, x.device))
        batch = build_halves(s, c, table, SIZE, x.device, most_tokens=len(x))
        assert batch.halves is not None
        assert [half.n_tokens for half in batch.halves] == [(len(x) + 1) // 2, len(x) // 2]
        expected = AttentionBatch.build(s, c, table, SIZE, x.device)
        assert torch.equal(batch.positions, expected.positions) and torch.equal(batch.token_row, expected.token_row)
        assert torch.equal(batch.write_rows, expected.write_rows) and batch.max_context == expected.max_context
        torch.testing.assert_close(run(engine, x, batch), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("total", [0, 1, 2])
def test_few_tokens(engine, total):
    s, c = np.zeros(total, np.int64), np.ones(total, np.int64)
    batch = build_halves(s, c, pages(2)[:total], SIZE, torch.device("cpu"), most_tokens=5)
    assert batch.halves is not None and all(half.most_tokens == 3 for half in batch.halves)
    x = torch.randn(total, 128)
    whole = AttentionBatch.build(s, c, pages(2)[:total], SIZE, x.device)
    torch.testing.assert_close(run(engine, x, batch), run(engine, x, whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("valid", [5, 3, 1, 0])
def test_padded_steps_of_single_tokens(engine, valid):
    """On the fused path, by the kernels' twins."""
    engine.stage.model.fuse(AttentionOps.load("torch"), MoEOps.load("torch"))
    table, rows = pages(5), torch.arange(5)
    table[valid:] = engine.runner.cache.dummy_page
    n_valid = torch.tensor([valid], dtype=torch.int32)
    for position in range(40):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(position))
        batch = AttentionBatch.static(
            torch.full((5,), position), rows, table, SIZE, max_context=48, n_valid=n_valid, most_tokens=5
        )  # fmt: skip
        halved = static_halves(batch)
        assert halved.halves is not None and [half.n_tokens for half in halved.halves] == [3, 2]
        assert [int(half.n_valid) for half in halved.halves] == [min(valid, 3), max(0, valid - 3)]
        if position % 13 and position < 38:
            run(engine, x, batch)
            continue
        whole = run(engine, x, batch)[:valid]
        torch.testing.assert_close(run(engine, x, halved)[:valid], whole, atol=1e-5, rtol=1e-5)


def test_the_order_of_calls():
    """What overlaps follows from it: both halves are on their way before the first one's experts begin."""
    said: list[str] = []

    class Layer:
        def __init__(self, name: str, sparse: bool) -> None:
            self.name, self.mlp = name, (Sparse(name) if sparse else self.dense)

        def dense(self, x: torch.Tensor) -> torch.Tensor:
            said.append(f"dense {self.name}")
            return x

        def attend(self, x: torch.Tensor, batch: Any, cache: Any, topk: Any) -> Any:
            said.append(f"attend {self.name}{batch.n_tokens}")
            return x, x, None

    from rorqual.moe.layer import MoE

    class Sparse(MoE):
        def __init__(self, name: str) -> None:
            torch.nn.Module.__init__(self)
            self.name = name

        def begin(self, x: torch.Tensor, *_: Any) -> Any:
            said.append(f"send {self.name}{len(x)}")
            return len(x)

        def compute(self, x: torch.Tensor, flight: Any) -> Any:
            said.append(f"experts {self.name}{flight}")
            return None

        def finish(self, flight: Any, beside: Any) -> torch.Tensor:
            said.append(f"land {self.name}{flight}")
            return torch.zeros(flight, 1)

    batches: Any = [type("B", (), {"n_tokens": n, "n_valid": None, "most_tokens": 2})() for n in (2, 1)]
    layers = {"0": Layer("a", False), "1": Layer("b", True), "2": Layer("c", True)}
    run_halves(layers, torch.zeros(3, 1), batches, [None] * 3)  # type: ignore[list-item]
    assert said == [
        "attend a2", "dense a", "attend a1", "dense a",
        "attend b2", "send b2", "attend b1", "send b1", "experts b2", "experts b1",
        "land b2", "attend c2", "send c2", "land b1", "attend c1", "send c1", "experts c2", "experts c1", "land c2", "land c1",
    ]  # fmt: skip
