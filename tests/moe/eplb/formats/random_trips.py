"""Random loads and placements through every format and back: ``python -m tests.moe.eplb.formats.random_trips --seeds 500``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from rorqual.moe.eplb.formats import FORMATS, ExpertMap, read_load, read_map, summed, write_load, write_map
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace

#: formats that keep a trace whole, the suffix they are written with
WHOLE = {"jsonl-load": ".jsonl", "parquet-load": ".parquet", "sglang-load": ".pt", "sglang-pass-load": ".pt", "vllm-load": ".json",
         "vllm-lines-load": ".jsonl"}  # fmt: skip
EMPTY_ALLOWED = ("jsonl-map", "parquet-map")
UNEVEN_ALLOWED = (*EMPTY_ALLOWED, "ascend-map")


def random_trace(rng: np.random.Generator) -> LoadTrace:
    steps, layers, experts = int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(1, 40))
    counts = rng.integers(0, int(rng.choice([2, 100, 2**40])), (steps, layers, experts))
    ids = np.sort(rng.choice(90, layers, replace=False))
    known = rng.random(5) < 0.6
    return LoadTrace(
        counts=counts,
        layer_ids=tuple(map(int, ids)),
        top_k=int(rng.integers(1, 9)) if known[0] else None,
        tokens=rng.integers(0, 2**40, steps) if known[1] else None,
        phase=rng.integers(0, 3, steps) if known[2] else None,
        domain=tuple(str(rng.choice(["", "a", "ü\n", '"'])) for _ in range(steps)) if known[3] else None,
        n_ranks=int(rng.integers(1, 99)) if known[4] else None,
        meta={"a": "x\ny", "passes": "no"} if known[0] else {},
    )


def random_map(rng: np.random.Generator, *, empty: bool, uneven: bool) -> ExpertMap:
    layers, experts, ranks = int(rng.integers(1, 5)), int(rng.integers(1, 30)), int(rng.integers(1, 6))
    per_rank = -(-experts // ranks) + int(rng.integers(0, 3))
    sizes = tuple((per_rank + rng.integers(0, 4, ranks) * uneven).tolist())
    n_slots = sum(sizes)
    spare = rng.integers(-1 if empty else 0, experts, (layers, n_slots - experts))
    slots = rng.permuted(np.concatenate([np.tile(np.arange(experts), (layers, 1)), spare], 1), axis=1)
    topology = Topology(slots=sizes, nodes=tuple(np.sort(rng.integers(0, 3, ranks)).tolist()))
    ids = tuple(np.sort(rng.choice(70, layers, replace=False)).tolist())
    return ExpertMap(slot_to_expert=slots, n_experts=experts, layer_ids=ids, topology=topology, meta={"seed": "ü"})


def same_trace(a: LoadTrace, b: LoadTrace) -> bool:
    arrays = all((x is None) == (y is None) and (x is None or np.array_equal(x, y)) for x, y in ((a.tokens, b.tokens), (a.phase, b.phase)))
    rest = all(getattr(a, name) == getattr(b, name) for name in ("layer_ids", "top_k", "domain", "n_ranks", "meta"))
    return arrays and rest and np.array_equal(a.counts, b.counts)


def trip(seed: int, folder: Path) -> int:
    """Trips made with this seed. AssertionError: one did not come back as it went."""
    rng, trips = np.random.default_rng(seed), 0
    trace = random_trace(rng)
    for name, suffix in WHOLE.items():
        path = write_load(trace, folder / f"x{suffix}", format=name)
        assert same_trace(read_load(path), trace), (seed, name)
        trips += 1
    one = summed(trace)
    for suffix in (".pt", ".npz", ".safetensors"):
        found = read_load(write_load(one, folder / f"w{suffix}", format="eplb-load"))
        assert np.array_equal(found.counts, one.counts) and found.layer_ids == one.layer_ids, (seed, suffix)
        trips += 1
    for each in FORMATS:
        if each.what == "map" and each.name != "local-map":
            expert_map = random_map(rng, empty=each.name in EMPTY_ALLOWED, uneven=each.name in UNEVEN_ALLOWED)
            path = write_map(expert_map, folder / f"m{(each.suffixes or ('.json',))[0]}", format=each.name)
            found_map = read_map(path, n_experts=expert_map.n_experts, layer_ids=expert_map.layer_ids)
            assert np.array_equal(found_map.slot_to_expert, expert_map.slot_to_expert), (seed, each.name)
            assert found_map.layer_ids == expert_map.layer_ids and found_map.n_experts == expert_map.n_experts, (seed, each.name)
            if each.name in EMPTY_ALLOWED:
                assert (found_map.topology, found_map.meta) == (expert_map.topology, expert_map.meta), (seed, each.name)
            trips += 1
    return trips


def main() -> None:
    """Print the number of trips, all exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        print(f"{sum(trip(seed, Path(folder)) for seed in range(seeds))} trips of {seeds} seeds came back exact")


if __name__ == "__main__":
    main()
