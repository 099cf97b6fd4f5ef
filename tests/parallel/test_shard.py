"""Sharded layers against whole ones, the bookkeeping of shards, and layouts that do not divide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from rorqual.parallel.progress import Progress
from rorqual.parallel.shard import ColumnLinear, RowLinear, Shard, VocabEmbedding, VocabHead, shard_model
from rorqual.parallel.tokens import gather_tokens, slice_tokens
from tests.ranks import run_ranks

TABLE = {"up": "column", "block.down": "row", "embed": "vocab_embedding", "head": "vocab_head"}


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24, bias=bias)
        self.down = nn.Linear(24, 8, bias=bias)
        self.other = nn.Linear(8, 8)


class Net(nn.Module):
    """Small integers for weights, so that every sum is exact in any order."""

    def __init__(self, vocab: int, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 8, _weight=torch.zeros(vocab, 8))  # its own filling is slow to load on the meta device
        self.block = Block(bias)
        self.head = nn.Linear(8, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.block.other(self.block.down(torch.relu(self.block.up(x)))))


def fill(net: nn.Module) -> nn.Module:
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=gen))
    return net


def load(sharded: nn.Module, whole: nn.Module) -> None:
    full = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            shard = getattr(parameter, "shard", None)
            source = full[name] if shard is None else full[name].narrow(shard.dim, shard.start, shard.stop - shard.start)
            assert parameter.shape == source.shape and (shard is None or shard.full == full[name].shape[shard.dim])
            parameter.copy_(source)


def compare(world: int) -> list[str]:
    grid = Grid.create(GridSpec(tp=world), torch.device("cpu"), 30.0)
    for vocab in (16, 13, 3):  # 13 and 3 do not divide: the last ranks have fewer rows, or none
        for bias in (False, True):
            whole = fill(Net(vocab, bias))
            with torch.device("meta"):
                sharded = Net(vocab, bias)
            shard_model(sharded, TABLE, grid.tp)
            sharded = sharded.to_empty(device="cpu")
            load(sharded, whole)
            for ids in (torch.arange(vocab), torch.tensor([vocab - 1]), torch.empty(0, dtype=torch.int64)):
                with torch.no_grad():
                    assert torch.equal(sharded(ids), whole(ids)), (vocab, bias, len(ids))
    for n in (0, 1, 5, 8):
        x = torch.arange(n * 3.0).view(n, 3)
        start, stop = slice_tokens(n, grid.tp)
        assert torch.equal(gather_tokens(x[start:stop], n, grid.tp), x) and 0 <= stop - start - n // world <= 1
    kinds = [type(m).__name__ for m in (sharded.embed, sharded.block.up, sharded.block.down, sharded.block.other, sharded.head)]
    grid.close()
    return kinds


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_model_equals_the_whole(world: int) -> None:
    assert run_ranks(compare, world, world)[1] == ["VocabEmbedding", "ColumnLinear", "RowLinear", "Linear", "VocabHead"]


def pretend(size: int, index: int) -> Group:
    return Group("tp", range(size), index, process_group=None, deadline_s=1.0, progress=Progress(rank=index))


def test_shards_of_a_vocabulary_that_does_not_divide() -> None:
    with torch.device("meta"):
        embedding, head = nn.Embedding(13, 4, _weight=torch.zeros(13, 4)), nn.Linear(4, 13, bias=False)
    parts = [VocabEmbedding(embedding, pretend(4, r)).shards["weight"] for r in range(4)]
    assert parts == [Shard(dim=0, start=s, stop=e, full=13) for s, e in ((0, 4), (4, 8), (8, 12), (12, 13))]
    assert VocabHead(head, pretend(4, 3)).weight.shape == (1, 4)


def test_shard_marks_survive_moves_and_casts() -> None:
    with torch.device("meta"):
        column, row = nn.Linear(8, 6), nn.Linear(6, 8)
    up = ColumnLinear(column, pretend(2, 1)).to_empty(device="cpu").bfloat16()
    down = RowLinear(row, pretend(3, 2)).to_empty(device="cpu")
    assert up.weight.shard == up.bias.shard == Shard(dim=0, start=3, stop=6, full=6) and up.weight.dtype == torch.bfloat16
    assert down.weight.shard == Shard(dim=1, start=4, stop=6, full=6) and not hasattr(down.bias, "shard")
    assert not any(p.requires_grad for p in [*up.parameters(), *down.parameters()])


def test_one_rank_changes_nothing() -> None:
    net = Net(13, True)
    before = dict(net.named_modules())
    shard_model(net, TABLE, Group.solo())
    assert dict(net.named_modules()) == before


def test_longest_suffix_wins() -> None:
    net = Net(16, False)
    shard_model(net, {"down": "column", "block.down": "row"}, pretend(2, 0))
    assert isinstance(net.block.down, RowLinear)


@pytest.mark.parametrize(
    ("table", "size", "message"),
    [
        ({"up": "column"}, 5, r"block\.up: 24 output features do not divide over tp=5 ranks; valid tp: 1, 2, 3, 4, 6, 8, 12, 24"),
        ({"up": "row"}, 3, r"block\.up: 8 input features do not divide over tp=3 ranks; valid tp: 1, 2, 4, 8"),
        ({"up": "diagonal"}, 2, r"unknown kinds of sharding \['diagonal'\]; known: \['column', 'row', 'vocab_embedding', 'vocab_head'\]"),
        ({"embed": "row"}, 2, "embed: row sharding needs Linear, found Embedding"),
    ],
)
def test_refusals(table: dict[str, str], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_model(Net(16, False), table, pretend(size, 0))


def test_head_with_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="head has no bias; found one"):
        VocabHead(nn.Linear(4, 8), pretend(2, 0))
