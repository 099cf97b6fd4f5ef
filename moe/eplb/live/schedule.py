"""From one placement to another in batches, each of which leaves every expert a slot."""

from __future__ import annotations

from collections.abc import Sequence

from ..topology import Ints, Topology
from .batch import BatchBuilder, LayerSlots
from .changes import Batch

_WINDOW = 4  # layers that a batch may take changes of: those before are finished first


def make_schedule(old: Ints, new: Ints, topology: Topology, *, staging: int, max_sends: int) -> list[Batch]:
    """Batches that turn ``old`` into ``new``. The same on all ranks; a pure function.

    A change overwrites the expert of a slot. If that was the last copy, the batch must bring another, whose place is taken from
    the next expert, and so on: a chain, which a batch takes as a whole or not at all. A cycle of changes that no batch has room
    for is cut into exchanges of two slots, which go by a place that is not the last one: then more experts travel than the plan needs.

    Args:
        old: [layers, slots] logical experts, -1: empty. Experts of ``new`` that it lacks are loaded (``Batch.loads``).
        new: [layers, slots], every expert of a layer of ``old`` among them.
        topology: of the slots.
        staging: experts that a rank may receive in a batch, 1 or more.
        max_sends: experts that a rank may send in a batch, 1 or more.

    Raises:
        ValueError: shapes differ, or an expert of ``old`` has no slot in ``new``.
    """
    if old.shape != new.shape or old.shape[1] != topology.n_slots:
        raise ValueError(f"move: from {list(old.shape)} to {list(new.shape)} slots, the topology has {topology.n_slots}; all must agree")
    layers = [LayerSlots.of(index, row, target) for index, (row, target) in enumerate(zip(old.tolist(), new.tolist(), strict=True))]
    for layer in layers:
        gone = sorted(layer.holders.keys() - set(layer.new) - {-1})
        if gone:
            raise ValueError(f"move: the new placement of layer {layer.index} has no slot for experts {gone}; every expert needs one")
    batches: list[Batch] = []
    unfinished = [layer for layer in layers if layer.pending]
    while unfinished:
        batches.append(_next(unfinished[:_WINDOW], topology, staging, max_sends))
        unfinished = [layer for layer in unfinished if layer.pending]
    return batches


def _next(layers: Sequence[LayerSlots], topology: Topology, staging: int, max_sends: int) -> Batch:
    builder = BatchBuilder(topology, staging=staging, max_sends=max_sends)
    for layer in layers:
        for slot in list(layer.pending):
            if (layer.index, slot) not in builder.changes:
                builder.add_chain(layer, slot)
    if not builder.changes:
        for slot in list(layers[0].pending):
            builder.add_exchange(layers[0], slot)
    assert builder.changes, "an exchange of two slots fits an empty batch"
    by_index = {layer.index: layer for layer in layers}
    for (index, slot), expert in builder.changes.items():
        by_index[index].put(slot, expert)
    return builder.batch()
