"""Memory of slots and of moves is said before a model is loaded, and is counted before the KV pool."""

from __future__ import annotations

import json

import pytest
import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.eplb.room import expert_bytes, staging_bytes
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.models.skeleton import Place, make_skeleton
from rorqual.launch.cli import main
from rorqual.launch.doctor_balance import balance_rows
from rorqual.launch.inspect import describe
from rorqual.parallel.grid import GridSpec
from tests.checkpoints import TINY

MODEL = parse_model_config(TINY)  # 16 experts of 3 x 128 x 256 values in layers 1 to 4
ONE = 3 * 128 * 256 * 2  # bytes of an expert in bf16
BUFFER = ONE + 64  # with what is said of it
PLAN = ["plan", "tiny", "--gpu-memory", "2GB", "--host-memory", "1GiB", "--context", "512", "--layout", "dp4", "--json"]


def planned(capsys, *more: str) -> dict:
    assert main([*PLAN, *more]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_plan_counts_slots_and_staging(capsys):
    off, on = planned(capsys), planned(capsys, "--enable-eplb", "--num-redundant-experts", "3")
    assert off["experts"][0]["text"] == "EPLB off" and off["experts"][0]["slot_bytes"] == 4 * 4 * ONE
    (found,) = on["experts"]
    assert (found["layers"], found["slots_per_rank"], found["redundant"], found["expert_bytes"]) == (4, 5, 4, ONE)
    assert found["slot_bytes"] == 5 * 4 * ONE == on["stages"][0]["weights"]["routed experts"]
    assert found["staging_bytes"] == 5 * BUFFER  # four experts, and one to send from
    assert found["text"].startswith(
        "EPLB enabled on 4 MoE layers (1 to 4), 5 slots a rank, 4 of all ranks' for copies (3 asked for, rounded up)"
    )
    assert f"{5 * 4 * ONE + 5 * BUFFER:,} bytes" in found["text"]
    device = on["stages"][0]["modes"]["off"]["device"]
    assert device["experts on the move"] == 5 * BUFFER
    assert on["stages"][0]["modes"]["off"]["device_total"] == 2 * 10**9
    kv = [found["modes"]["off"]["pages"] for found in (off, on)]
    assert kv[1] < kv[0]  # what experts take, the KV pool has less


def test_plan_and_inspect_refuse_what_the_engine_refuses(capsys):
    assert main([*PLAN[:-1], "--enable-eplb", "--num-redundant-experts", "49"]) == 2
    assert "use at most 48" in capsys.readouterr().err
    assert main(["plan", "tiny", *PLAN[2:8], "--layout", "tp1", "--enable-eplb"]) == 2
    assert "enable_eplb is about experts on different ranks" in capsys.readouterr().err
    with pytest.raises(ValueError, match="enable_eplb needs pipeline_parallel_size 1"):
        describe(MODEL, dp=2, pp=2, enable_eplb=True)


def test_inspect_says_it():
    plain, found = describe(MODEL, dp=4), describe(MODEL, dp=4, enable_eplb=True, num_redundant_experts=3)
    parts, before = found["per_rank"][0]["parts"], plain["per_rank"][0]["parts"]
    assert parts["routed experts"] == 5 * 4 * ONE and before["routed experts"] == 4 * 4 * ONE
    assert parts["experts on the move"] == 5 * BUFFER and "experts on the move" not in before
    assert found["per_rank"][0]["experts"].startswith("EPLB enabled on 4 MoE layers (1 to 4), 5 slots a rank")
    assert plain["per_rank"][0]["experts"] == ""
    placed = describe(MODEL, dp=4, pp=2, num_redundant_experts=4)
    second = placed["per_rank"][1]["experts"]
    assert "Experts placed on 3 MoE layers (2 to 4)" in second and "do not move" in second
    assert describe(MODEL, dp=3, num_redundant_experts=1)["per_rank"][0]["parts"]["routed experts"] == 6 * 4 * ONE


def test_bytes_of_experts_with_scales():
    config = EngineConfig(model="m", data_parallel_size=2, enable_eplb=True, fp8_gemm_backend="torch")
    fp8 = parse_model_config(TINY)
    object.__setattr__(fp8, "quantization", {"weight_block_size": [128, 128]})
    rank = make_skeleton(fp8, config, Place.planned(GridSpec(dp=2), 0), torch.device("cpu"), torch.bfloat16)
    weights, scales = 3 * 128 * 256, 4 * 3 * 2  # FP8 values; an fp32 scale for each 128 x 128 of them
    assert expert_bytes(rank.model) == weights + scales
    assert rank.staging == staging_bytes(config, rank.model) == 5 * (2 * 128 * 256 + 128 * 256 + 16 + 16 + 64)
    assert rank.placement is not None and rank.placement.slots_per_rank == 8


def test_the_doctor_knows_what_experts_can_do_here():
    rows = {name: (usable, why) for kind, name, usable, why in balance_rows() if kind == "experts"}
    assert rows["planner"][0] and rows["moves on CPUs"][0]
    assert set(rows) == {"planner", "moves on CPUs", "moves on GPUs", "parquet", "yaml", "report"}
    assert all("pip install 'rorqual[eplb]'" in why for name, (usable, why) in rows.items() if not usable and name[0] not in "m")
