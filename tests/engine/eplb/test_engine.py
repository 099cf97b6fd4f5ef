"""Balancing beside the rest of the engine: graphs, what is refused once ranks are there, waits that are given up, reports, the close."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rorqual.attention.batch import AttentionBatch
from tests.checkpoints import checkpoint
from tests.engine.eplb.jobs import DEBUG, DP, Found, balanced, check_whole, run
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.ranks import run_ranks

N = 24
PROMPTS = 3
MOVES = {"policy": "random", "step_interval": 1, "num_redundant_experts": 3, "staging_experts": 24}


@dataclass(kw_only=True)
class Seen:
    """What one of two ranks saw, engine after engine."""

    slow: Found
    swapped: Found
    refused: list[str]
    stats: dict[str, Any]
    played: Found


def everything(folder: str, files: str) -> Seen:
    """One rank's."""
    return Seen(slow=slow(folder), swapped=swapped(folder), refused=refused(folder), stats=reports(folder, files), played=played(folder))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def seen(files) -> list[Seen]:
    return run_ranks(everything, 2, str(checkpoint("v32")), str(files), env=DEBUG, timeout=240.0)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy_tokens(checkpoint("v32"), prompts=ragged_prompts(PROMPTS), n=N)


def generate(folder: str, settings: dict[str, Any], **more: Any) -> Found:
    return run(folder, ragged_prompts(PROMPTS), N, {DP: 2, **settings}, **more)


def slow(folder: str) -> Found:
    """The first rank plans its first plan for longer than the others have patience."""
    slept: list[int] = []

    def probe(point: str) -> None:
        if point == "plan" and not slept:
            slept.append(1)
            time.sleep(3.0)

    def prepare(llm: Any) -> None:
        llm.engine.experts.live.mover.probe = probe

    return generate(folder, balanced(**{**MOVES, "patience_steps": 3}), prepare=prepare, cycles=1)


def test_a_slow_plan_is_given_up(seen, expected):
    found = [rank.slow for rank in seen]
    assert found[0].tokens == expected * (len(found[0].tokens) // PROMPTS)
    check_whole(found)
    assert found[0].stats["cycles"]["aborted"] >= 1 and found[0].stats["cycles"]["ended"] >= 1


def swapped(folder: str) -> Found:
    """No copies, room for one expert and half of one a step: experts can only change places, a pair after the other."""
    moves = balanced(**{**MOVES, "num_redundant_experts": 0, "staging_experts": 1}, bytes_per_step=50_000)
    more = {"disable_overlap_schedule": True, "ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "shm"}
    return generate(folder, {**moves, **more}, cycles=1)


def test_experts_change_places_without_spare_slots(seen, expected):
    found = [rank.swapped for rank in seen]
    assert found[0].tokens == expected * (len(found[0].tokens) // PROMPTS)
    check_whole(found)
    assert found[0].stats["cycles"]["ended"] >= 1 and found[0].stats["experts_received"] >= 1


def refused(folder: str) -> list[str]:
    """What engines with these settings, and one with a map of this rank's own, are refused with."""
    from rorqual import LLM

    maps = [json.dumps({"physical_to_logical_map": [np.roll(np.arange(16), shift).tolist()] * 2}) for shift in (0, 1)]
    settings: list[dict[str, Any]] = [{"eplb_bytes_per_step": 64}, {"num_redundant_experts": 17}]
    said = []
    rank = int(os.environ["RANK"])
    for args in [*settings, {"init_expert_location": maps[rank]}, {"init_expert_location": "/nowhere" if rank else maps[0]}]:
        try:
            LLM(folder, skip_tokenizer_init=True, disable_log_stats=True, dist_timeout=60.0, enable_eplb=True, **{DP: 2, **args}).close()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_refusals_with_ranks(seen):
    """On all ranks alike; the process groups are left in good order each time, so that the next engine starts."""
    first, second = (rank.refused for rank in seen)
    assert "bytes_per_step 64 is too little for experts of" in first[0]
    assert "num_redundant_experts 17 makes 17 slots a rank, but a layer has 16 experts" in first[1]
    assert "were not started alike: init_expert_location is" in first[2] and "(ranks 1)" in first[2]
    assert second[:3] == first[:3]
    assert second[3] == first[3] and "were not started alike: init_expert_location is" in first[3] and "/nowhere" in first[3]


def reports(folder: str, files: str) -> dict[str, Any]:
    """Statistics and dumps of a short run with copies of experts, which do not move."""
    from rorqual import LLM, SamplingParams

    args = {DP: 2, "num_redundant_experts": 2, "expert_distribution_recorder_mode": "stat", "expert_distribution_dump": f"{files}/end.pt"}
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", disable_log_stats=True, max_total_tokens=4096, **args) as llm:
        llm.generate(ragged_prompts(4), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.dump_expert_distribution(f"{files}/call.pt")
        stats: dict[str, Any] = llm.stats()
        return stats


def test_reports(seen, files):
    from rorqual.launch.summary import rank_rows
    from rorqual.moe.eplb.formats import read_load

    stats = seen[0].stats
    assert [row["experts"] for row in stats["ranks"]] == [9, 9]
    assert stats["ranks"][1]["expert_slots"]["1"] == [9, 10, 11, 12, 13, 14, 15, 0, 1]
    assert stats["ranks"][0]["eplb"]["layers"] == 2
    total = np.array(stats["expert_load"]).sum()
    rows = rank_rows(stats)
    assert abs(rows[0][7] + rows[1][7] - total) <= 1  # halves of what copies share are rounded
    dumps = sorted(files.iterdir())
    assert len(dumps) == 2, dumps
    for path in dumps:
        assert int(read_load(path).total.sum()) == total


def played(folder: str) -> Found:
    """Decode steps are replayed, as far as a CPU can: inputs, tables and weights are where they were when the graph was made."""
    from rorqual.engine import assembly, tables
    from rorqual.engine.graphs import DecodeGraphs
    from rorqual.engine.models.build import Stage
    from tests.engine.stub import FakeStreams

    def batch(entry: Any, positions: Any, rows: Any, page_size: int, max_context: int, n_valid: Any) -> AttentionBatch:
        return AttentionBatch.build(positions.numpy(), np.ones(len(rows)), entry.page_table, page_size, positions.device)

    assembly.uses_graphs = lambda *a: True  # type: ignore[assignment]
    Stage.capturable = True  # type: ignore[assignment,method-assign]
    assembly.DecodeGraphs = partial(DecodeGraphs, make_batch=batch)  # type: ignore[assignment,misc]
    tables.Streams = FakeStreams  # type: ignore[misc]
    return generate(folder, {**balanced(**MOVES), "cuda_graph_bs": (4,), "max_num_seqs": 4, "max_model_len": 128}, cycles=2)


def test_played_graphs_keep_tokens(seen, expected):
    found = [rank.played for rank in seen]
    assert found[0].tokens == expected * (len(found[0].tokens) // PROMPTS)
    check_whole(found)


def test_what_is_not_recorded_is_not_dumped():
    from rorqual import LLM

    with LLM(str(checkpoint("v32")), skip_tokenizer_init=True, disable_log_stats=True, max_total_tokens=512) as llm:
        with pytest.raises(ValueError, match="no load of experts is recorded; set expert_distribution_recorder_mode"):
            llm.dump_expert_distribution("x.pt")
