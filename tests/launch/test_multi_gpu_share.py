"""One GPU in the place of one rank of many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rorqual.launch.bench.multi_gpu.fit import fitting_layers
from rorqual.launch.bench.multi_gpu.program import program, share
from rorqual.launch.bench.multi_gpu.shapes import BASE


def test_a_share_of_eight_has_the_experts_of_a_rank_of_eight():
    parts = share(8, device="cuda", only=("slice", "full"))
    assert [p.name for p in parts] == ["one GPU with its share of the experts", "one rank of 8, full size, offload off",
                                       "one rank of 8, full size, offload host"]  # fmt: skip
    (of_eight,) = program(8, device="cuda", only=("full",), right=Path("x"))[:1]

    def shape(part):
        return json.loads(part.words[part.words.index("--shape") + 1])

    assert {p.ranks for p in parts} == {1} and [shape(p)["n_routed_experts"] for p in parts] == [32] * 3
    assert shape(of_eight) == {**shape(parts[1]), "n_routed_experts": 256}
    settings = {"kv_cache_dtype": "fp8", "max_model_len": 131184, "max_num_seqs": 4, "max_total_tokens": 132000, "kv_offload": "host"}
    given = {"settings": settings, "host_bytes": 56 << 30, "shape": shape(parts[2])}
    assert fitting_layers(BASE, 61, ranks=1, gpu_bytes=140 << 30, **given) == 61


def test_a_share_that_no_token_can_route_in_is_refused():
    """A token takes 8 experts out of 4 groups: of 16 it can, of 8 it cannot."""
    assert len(share(16, device="cuda", only=("full",))) == 2
    for of in (17, 32, 300):
        with pytest.raises(ValueError, match=f"--share-of {of} leaves one GPU 8 of .* at most --share-of 16"):
            share(of, device="cuda", only=("full",))
