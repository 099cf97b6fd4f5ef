"""Linears and embeddings split over the ranks of a group, and the swap that puts them into a model.

Column and row splits and their one all-reduce per block are those of Megatron-LM (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .group import Group
from .linear import BLOCK, Fp8Linear, gated_product, narrow_like, product, scales_like


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of a full parameter this rank holds: ``full_parameter.narrow(dim, start, stop - start)``."""

    dim: int  # dimension that is split
    start: int  # first index of this rank's part
    stop: int  # one past the last
    full: int  # size of the whole dimension

    def blocks(self) -> Shard:
        """The part of the block scales that goes with this part of an FP8 weight."""
        return Shard(dim=self.dim, start=self.start // BLOCK, stop=-(-self.stop // BLOCK), full=-(-self.full // BLOCK))


class _Sharded(nn.Module):
    """Keeps ``parameter.shard`` alive when torch replaces parameters (``to_empty``, ``to``)."""

    group: Group
    shards: dict[str, Shard]
    weight: nn.Parameter
    weight_scale_inv: nn.Parameter | None  # block scales of an FP8 weight
    bias: nn.Parameter | None

    def _own(self, name: str, like: torch.Tensor, shape: tuple[int, ...], shard: Shard | None) -> None:
        parameter = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device), requires_grad=False)
        self.register_parameter(name, parameter)
        if shard is not None:
            self.shards[name] = shard
            parameter.shard = shard  # type: ignore[attr-defined]

    def narrow(self) -> bool:
        """Make the weight block FP8; False, and nothing done, where this rank's part cuts a block."""
        shard = self.shards["weight"]
        if shard.start % BLOCK or (shard.stop % BLOCK and shard.stop != shard.full):
            return False
        wide = self.weight
        self.weight, self.shards["weight_scale_inv"] = narrow_like(wide), shard.blocks()
        self.weight.shard = shard  # type: ignore[attr-defined]
        self.register_parameter("weight_scale_inv", scales_like(wide))
        assert self.weight_scale_inv is not None
        self.weight_scale_inv.shard = self.shards["weight_scale_inv"]  # type: ignore[attr-defined]
        return True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _Sharded:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, shard in self.shards.items():
            getattr(self, name).shard = shard
        return self


def _even(size: int, group: Group) -> tuple[int, int]:
    per = size // group.size
    return group.index * per, (group.index + 1) * per


class ColumnLinear(_Sharded):
    """Holds a block of the output features: x [..., in] -> [..., out / size]."""

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group, self.shards = group, {}
        start, stop = _even(full.out_features, group)
        shard = Shard(dim=0, start=start, stop=stop, full=full.out_features)
        self._own("weight", full.weight, (stop - start, full.in_features), shard)
        self.register_parameter("bias", None)
        self.register_parameter("weight_scale_inv", None)
        if full.bias is not None:
            self._own("bias", full.bias, (stop - start,), shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] on every rank -> this rank's block of the outputs."""
        return product(x, self.weight, self.weight_scale_inv, self.bias)


class RowLinear(_Sharded):
    """Holds a block of the input features: x [..., in / size] -> [..., out], summed over the ranks. Bias added once."""

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group, self.shards = group, {}
        start, stop = _even(full.in_features, group)
        shard = Shard(dim=1, start=start, stop=stop, full=full.in_features)
        self._own("weight", full.weight, (full.out_features, stop - start), shard)
        self.register_parameter("bias", None)
        self.register_parameter("weight_scale_inv", None)
        if full.bias is not None:
            self._own("bias", full.bias, (full.out_features,), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's block of the inputs -> the full product, on every rank."""
        out = self.group.all_reduce(product(x, self.weight, self.weight_scale_inv))
        return out if self.bias is None else out + self.bias

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``forward(silu(gate) * up)`` of this rank's blocks ``gate_up`` [T, 2 * in / size]; only without a bias."""
        return self.group.all_reduce(gated_product(gate_up, self.weight, self.weight_scale_inv))


def _vocab_part(full: int, group: Group) -> tuple[int, int, int]:
    """(start, stop, rows per rank before the cut): the vocabulary is padded to a multiple, and no rank keeps padding."""
    per = -(-full // group.size)
    return min(group.index * per, full), min((group.index + 1) * per, full), per


class VocabEmbedding(_Sharded):
    """Holds a block of the vocabulary's rows: ids [...] -> [..., dim], summed over the ranks."""

    def __init__(self, full: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.group, self.shards = group, {}
        self.start, self.stop, _ = _vocab_part(full.num_embeddings, group)
        shard = Shard(dim=0, start=self.start, stop=self.stop, full=full.num_embeddings)
        self._own("weight", full.weight, (self.stop - self.start, full.embedding_dim), shard)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Row ``ids`` of the full table; exactly one rank contributes to each, so the sum is exact."""
        if self.stop == self.start:
            out = self.weight.new_zeros((*ids.shape, self.weight.shape[1]))
        else:
            inside = (ids >= self.start) & (ids < self.stop)
            local = torch.where(inside, ids - self.start, 0)
            out = torch.where(inside.unsqueeze(-1), F.embedding(local, self.weight), 0)
        return self.group.all_reduce(out)


class VocabHead(_Sharded):
    """Holds a block of the vocabulary: x [n, in] -> logits [n, vocab], gathered from all ranks."""

    per_rank: int  # rows of every rank before the last ones are cut
    vocab: int  # rows of the whole head

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__()
        if full.bias is not None:
            raise ValueError("a sharded vocabulary head has no bias; found one")
        self.group, self.shards = group, {}
        start, stop, self.per_rank = _vocab_part(full.out_features, group)
        self.vocab = full.out_features
        self._own("weight", full.weight, (stop - start, full.in_features), Shard(dim=0, start=start, stop=stop, full=self.vocab))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] on every rank -> all logits [n, vocab] on every rank; the padding of the last ranks is cut off."""
        local = F.linear(x, self.weight)
        if local.shape[-1] < self.per_rank:
            local = F.pad(local, (0, self.per_rank - local.shape[-1]))
        blocks = self.group.all_gather(local).view(self.group.size, x.shape[0], self.per_rank)
        return blocks.transpose(0, 1).reshape(x.shape[0], self.group.size * self.per_rank)[:, : self.vocab]


_KINDS: dict[str, tuple[type[nn.Module], Callable[..., nn.Module]]] = {
    "column": (nn.Linear, ColumnLinear),
    "row": (nn.Linear, RowLinear),
    "vocab_embedding": (nn.Embedding, VocabEmbedding),
    "vocab_head": (nn.Linear, VocabHead),
}


def _check_divides(path: str, kind: str, module: nn.Module, group: Group) -> None:
    if kind not in ("column", "row"):
        return
    size = int(module.out_features if kind == "column" else module.in_features)  # type: ignore[arg-type]
    if size % group.size:
        valid = [n for n in range(1, size + 1) if size % n == 0][:12]
        side = "output" if kind == "column" else "input"
        raise ValueError(f"{path}: {size} {side} features do not divide over tp={group.size} ranks; valid tp: {', '.join(map(str, valid))}")


def shard_model(model: nn.Module, table: Mapping[str, str], group: Group) -> None:
    """Replace the modules that ``table`` names by this rank's parts, in place; leave all alone if the group is one rank.

    ``table`` maps a suffix of a module path, at a dot ("self_attn.q_b_proj"), to "column", "row", "vocab_embedding" or
    "vocab_head"; the longest suffix wins. Weights are left uninitialised, so do it on the meta device. Every split
    parameter then carries ``parameter.shard``. Raises ValueError for an unknown kind, for a suffix that names a module
    of another type, and for a size that does not divide.
    """
    unknown = sorted(set(table.values()) - set(_KINDS))
    if unknown:
        raise ValueError(f"unknown kinds of sharding {unknown}; known: {sorted(_KINDS)}")
    if group.size == 1:
        return
    for path, module in list(model.named_modules()):
        suffixes = [suffix for suffix in table if path == suffix or path.endswith("." + suffix)]
        if not suffixes:
            continue
        kind = table[max(suffixes, key=len)]
        expected, build = _KINDS[kind]
        if not isinstance(module, expected):
            raise ValueError(f"{path}: {kind} sharding needs {expected.__name__}, found {type(module).__name__}")
        _check_divides(path, kind, module, group)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, build(module, group))


def narrow_weights(model: nn.Module, suffixes: tuple[str, ...], wide: tuple[str, ...] = ()) -> None:
    """Make the weights of the linears that ``suffixes`` name (at a dot) block FP8, in place and without values.

    Modules whose path contains one of ``wide`` are left alone.

    Call it on the meta device after ``shard_model``. A linear whose part of this rank cuts a block keeps its dtype.
    """
    for path, module in list(model.named_modules()):
        if not any(path == suffix or path.endswith("." + suffix) for suffix in suffixes) or any(name in path for name in wide):
            continue
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.narrow()
        elif isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Fp8Linear(module))
