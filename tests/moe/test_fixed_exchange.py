"""Expert parallelism of fixed shapes against the dispatchers, over several ranks."""

from __future__ import annotations

import pytest
import torch

from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.select import make_dispatcher
from rorqual.moe.config import MoEConfig
from rorqual.moe.exchange import ExpertExchange
from rorqual.moe.layer import MoE
from rorqual.moe.load import ExpertLoad
from rorqual.moe.ops import MoEOps
from rorqual.moe.placement import Placement
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.group import Group
from tests.ranks import run_ranks

CONFIG = MoEConfig(hidden=64, intermediate=48, n_experts=8, top_k=3, n_group=4, topk_group=2, n_shared=1, routed_scaling_factor=2.5)
BATCH = 6


def rank_outputs(world: int, valid: list[int]) -> tuple[list, list, list, list]:
    """This rank's outputs by both ways, and the load counted by both."""
    grid = Grid.create(GridSpec(dp=world), torch.device("cpu"), 30.0)
    placement = Placement.identity(n_layers=1, n_experts=CONFIG.n_experts, n_ranks=world)
    spec = EPSpec(n_ranks=world, n_slots=CONFIG.n_experts, hidden=CONFIG.hidden, top_k=CONFIG.top_k, max_tokens=BATCH)
    layer = MoE(CONFIG, 0, n_slots=placement.slots_per_rank, inner=CONFIG.intermediate)
    generator = torch.Generator().manual_seed(0)
    whole = MoE(CONFIG, 0, n_slots=CONFIG.n_experts, inner=CONFIG.intermediate)
    for (_, mine), (_, full) in zip(layer.named_parameters(), whole.named_parameters(), strict=True):
        values = torch.randn(full.shape, generator=generator) * full.shape[-1] ** -0.5
        lo = grid.ep.index * placement.slots_per_rank
        mine.data = values if mine.shape == full.shape else values[lo : lo + placement.slots_per_rank]
    dispatcher = make_dispatcher("torch_static", grid, spec)
    loads = [ExpertLoad(1, CONFIG.n_experts), ExpertLoad(1, CONFIG.n_experts)]
    real = valid[grid.rank]
    x = torch.randn(BATCH, CONFIG.hidden, generator=torch.Generator().manual_seed(10 + grid.rank))
    found = []
    for load, fixed in zip(loads, (None, grid.ep), strict=True):
        layer.attach(ExpertExchange(dispatcher=dispatcher, tp=Group.solo("tp"), placement=placement, load=load, spread=True, fixed=fixed))
        layer.exchange.ops = MoEOps.load("torch")
        rows = layer(x[:real]) if fixed is None else layer(x, torch.tensor([real], dtype=torch.int32))
        found.append(rows[:real].tolist())
    grid.close()
    return found[0], found[1], loads[0].counts.tolist(), loads[1].counts.tolist()


@pytest.mark.parametrize("valid", [[6, 6], [4, 0], [1, 6, 3, 0]])
def test_padded_batches_give_what_the_dispatcher_gives(valid):
    for sent, fixed, load, counted in run_ranks(rank_outputs, len(valid), len(valid), valid):
        torch.testing.assert_close(torch.tensor(fixed), torch.tensor(sent), atol=1e-6, rtol=1e-6)
        assert load == counted
