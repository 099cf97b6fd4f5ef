"""A running engine's load is exact: each choice of each computed token once, over any data, tensor and pipeline parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rorqual.moe.eplb.formats import problems, read_load, sniff
from rorqual.moe.eplb.trace import PHASES
from tests.checkpoints import checkpoint
from tests.engine.eplb.jobs import DP, TP
from tests.engine.parity import ragged_prompts
from tests.ranks import run_ranks

K, E = 4, 16
LAYOUTS = [
    {DP: 2, TP: 2},  # experts on four ranks, each routes a slice
    {DP: 2, TP: 2, "expert_parallel_size": 1},  # every rank routes all tokens of its replica
]


def record(folder: str, file: str, mode: str, settings: dict[str, Any]) -> tuple[int, int]:
    """(tokens computed over all replicas, MoE layers) as the engine counts them; the recording is in ``file``."""
    from rorqual import LLM, SamplingParams

    torch.set_num_threads(1)
    base = {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": True, "max_num_seqs": 16, "max_total_tokens": 8192}
    base |= {"enable_prefix_caching": False, "expert_distribution_recorder_mode": mode, "expert_distribution_dump": file}
    with LLM(folder, **base, **settings) as llm:
        llm.generate(ragged_prompts(7), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), use_tqdm=False)
        stats = llm.stats()
        rows = [row for row in stats.get("ranks", []) if row["tp"] == 0 and row["pp"] == 0]
        return sum(row["tokens"] for row in rows), len(llm.engine.stage.model.moe_layers())


def record_layouts(folder: str, files: list[str]) -> list[tuple[int, int]]:
    return [record(folder, file, "per_pass", layout) for file, layout in zip(files, LAYOUTS, strict=True)]


def test_choices_are_tokens_times_top_k(tmp_path):
    files = [tmp_path / f"load{i}.pt" for i in range(len(LAYOUTS))]
    found = run_ranks(record_layouts, 4, str(checkpoint("v32")), list(map(str, files)), timeout=240.0)[0]
    traces = [read_load(path) for path in files]
    for trace, (tokens, layers) in zip(traces, found, strict=True):
        assert trace.top_k == K and trace.n_experts == E and len(trace.layer_ids) == layers
        assert int(trace.tokens.sum()) == tokens > 0
        assert (trace.counts.sum(2) == trace.tokens[:, None] * K).all()
        assert problems(trace, n_experts=E) == []
        assert PHASES.index("decode") in trace.phase and (trace.phase != PHASES.index("decode")).any()
    assert (traces[0].total == traces[1].total).all()  # the same tokens choose the same experts wherever they are


def test_tokens_of_one_rank(tmp_path):
    """Mode per_token: the choices of single tokens, which add up to the counts."""
    tokens, _ = record(str(checkpoint("v32")), str(tmp_path / "load.pt"), "per_token", {})
    path = tmp_path / "load_0.pt"
    assert sniff(path) == "sglang-pass-load"
    trace, records = read_load(path), torch.load(path, weights_only=True)["records"]
    assert int(trace.tokens.sum()) == tokens
    for step, each in enumerate(records):
        ids = each["topk_ids_of_layer"][list(trace.layer_ids)].numpy()
        assert ids.shape == (len(trace.layer_ids), int(trace.tokens[step]), K)
        assert all((np.bincount(layer.ravel(), minlength=E) == counts).all() for layer, counts in zip(ids, trace.counts[step], strict=True))


def test_a_dump_that_cannot_be_written_does_not_end_the_engine(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    record(str(checkpoint("v32")), str(tmp_path / "file" / "load.pt"), "stat", {})
    assert [path.name for path in Path(tmp_path).iterdir()] == ["file"]
    assert any("load.pt" in message and "not written" in message for message in caplog.messages)
