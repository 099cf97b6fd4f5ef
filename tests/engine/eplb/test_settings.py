"""What the settings of expert balancing mean, and which are refused, with the fix in the text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rorqual.engine.config import EngineConfig, check_config
from rorqual.engine.eplb.location import check_model, expert_topology, initial_placement, n_slots, sparse_layers
from rorqual.engine.eplb.room import live_config
from rorqual.engine.eplb_settings import EPLBSettings, eplb_settings, uses_placement
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.plan import StepPlan
from rorqual.launch.flags import Parser, add_options, chosen
from rorqual.moe.eplb.formats import ExpertMap, write_map
from rorqual.parallel.grid import GridSpec
from tests.checkpoints import TINY

MODEL = parse_model_config(TINY)  # 16 experts in layers 1 to 4 of 5
ON = {"model": "m", "data_parallel_size": 4, "enable_eplb": True}


def config(**settings) -> EngineConfig:
    return EngineConfig(**{**ON, **settings})


def flags(*words: str) -> EngineConfig:
    parser = Parser(prog="rorqual test")
    add_options(parser, EngineConfig)
    return EngineConfig(**chosen(parser.parse_args(words), EngineConfig))


@pytest.mark.parametrize(
    "words",
    [
        ["--eplb-step-interval", "7", "--num-redundant-experts", "4", "--eplb-window-size", "3"],
        ["--eplb-rebalance-num-iterations", "7", "--ep-num-redundant-experts", "4", "--eplb-window-size", "3"],
        ["--eplb-config", '{"step_interval": 7, "num_redundant_experts": 4, "window_size": 3}'],
        ["--eplb-config", '{"step_interval": 7, "num_redundant_experts": 4}', "--eplb-window-size", "3", "--eplb-step-interval", "7"],
    ],
)
def test_names_of_both_systems_mean_the_same(words):
    found = flags("--enable-eplb", *words)
    assert found.enable_eplb
    assert eplb_settings(found) == EPLBSettings(step_interval=7, num_redundant_experts=4, window_size=3)


def test_a_mapping_will_do(tmp_path):
    """In Python, and in a file of flags."""
    from rorqual.launch import cli

    assert eplb_settings(config(eplb_config={"step_interval": 7})).step_interval == 7
    (tmp_path / "c.json").write_text(json.dumps({"enable-eplb": True, "eplb_config": {"step_interval": 7}}))
    args = cli.parse("generate", ["tiny", "--config", str(tmp_path / "c.json")])[1]
    assert args.enable_eplb and eplb_settings(config(eplb_config=args.eplb_config)).step_interval == 7


def test_defaults_are_vllms():
    found = eplb_settings(config())
    assert (found.window_size, found.step_interval, found.num_redundant_experts, found.log_balancedness) == (1000, 3000, 0, False)
    assert found.horizon == 3000 and eplb_settings(config(eplb_config='{"horizon_steps": 9}')).horizon == 9
    moves = live_config(config(eplb_config='{"staging_experts": 2, "bytes_per_step": 5, "max_cycle_steps": 50}', eplb_step_interval=8))
    assert (moves.interval, moves.staging, moves.bytes_per_step, moves.max_steps) == (8, 2, 5, 50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_size": 1}, "enable_eplb is about experts on different ranks, but every rank has all experts"),
        ({"expert_parallel_size": 1}, "every rank has all experts; leave it out, or spread them .* without --ep-size 1"),
        ({"enable_eplb": False, "num_redundant_experts": 2, "data_parallel_size": 1}, "num_redundant_experts is about experts"),
        ({"enable_eplb": False, "init_expert_location": "x.json", "data_parallel_size": 1}, "init_expert_location is about experts"),
        ({"pipeline_parallel_size": 2}, "enable_eplb needs pipeline_parallel_size 1, found 2"),
        ({"ep_fault_tolerant": True}, "enable_eplb does not go with ep_fault_tolerant"),
        ({"enable_expert_load": False}, "enable_eplb needs the load of experts"),
        ({"eplb_config": "{"}, "eplb_config is not JSON"),
        ({"eplb_config": "[1]"}, "eplb_config must be a JSON object, found list"),
        ({"eplb_config": '{"window": 1}'}, "eplb_config has no key 'window'; known: num_redundant_experts, step_interval"),
        ({"eplb_config": '{"window_size": "1"}'}, "window_size must be of kind int, found '1'"),
        ({"eplb_config": '{"window_size": true}'}, "window_size must be of kind int, found True"),
        ({"eplb_config": '{"log_balancedness": 1}'}, "log_balancedness must be of kind bool, found 1"),
        ({"eplb_config": '{"use_async": false}'}, "use_async false: experts always travel beside the steps"),
        ({"eplb_config": '{"policy": "swipe"}'}, "policy of expert balancing must be one of default, random, found 'swipe'"),
        ({"eplb_config": '{"policy": "random"}'}, "policy random .* needs RORQUAL_DEBUG=1"),
        ({"eplb_config": '{"objective": "joy"}'}, "objective of expert balancing must be tokens, activated or seconds"),
        ({"eplb_config": '{"target": 0.9}'}, "target of expert balancing is largest over mean load, 1 or more, found 0.9"),
        ({"eplb_config": '{"step_interval": 5}', "eplb_step_interval": 6}, "eplb_step_interval is 6, but eplb_config says step_interval 5"),
        ({"eplb_step_interval": 0}, "step_interval of expert balancing must be at least 1, found 0"),
        ({"num_redundant_experts": -1}, "num_redundant_experts of expert balancing must be at least 0, found -1"),
        ({"num_redundant_experts": 1.5}, "num_redundant_experts must be a whole number, found 1.5"),
        ({"ep_dispatch_algorithm": "fake"}, "ep_dispatch_algorithm must be one of static, dynamic, lp, found 'fake'"),
        ({"ep_dispatch_algorithm": "lp", "enable_eplb": False}, "lp shares tokens over copies of experts, but there are none"),
        ({"ep_dispatch_algorithm": "lp", "enable_expert_load": False}, "ep_dispatch_algorithm lp needs the load of experts"),
        ({"eplb_config": '{"dispatch_interval": 0}'}, "dispatch_interval of expert balancing must be at least 1, found 0"),
        ({"expert_distribution_recorder_mode": "all"}, "recorder_mode must be one of stat, stat_approx, per_pass, per_token, found 'all'"),
        ({"expert_distribution_recorder_buffer_size": 0}, "buffer_size must be at least 1, found 0"),
        ({"expert_distribution_dump": "x.pt"}, "expert_distribution_dump needs something recorded; add expert_distribution_recorder_mode"),
        (
            {"expert_distribution_dump": "x.npz", "expert_distribution_recorder_mode": "stat"},
            "dump must end in one of .pt",
        ),
    ],
)
def test_refusals(settings, message, monkeypatch):
    monkeypatch.delenv("RORQUAL_DEBUG", raising=False)
    check_config(config())
    with pytest.raises(ValueError, match=message):
        check_config(config(**settings))


def test_random_plans_are_for_debugging(monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    check_config(config(eplb_config='{"policy": "random"}'))


# ---- slots


@pytest.mark.parametrize(
    ("settings", "ranks", "slots"),
    [
        ({"enable_eplb": False}, 4, 16),
        ({}, 4, 16),
        ({"num_redundant_experts": 1}, 4, 20),
        ({"num_redundant_experts": 4}, 4, 20),
        ({"num_redundant_experts": 5}, 4, 24),
        ({}, 3, 18),  # uneven without a copy: rounded up
        ({"num_redundant_experts": 3}, 8, 24),
        ({"num_redundant_experts": 16}, 16, 32),
        ({"num_redundant_experts": 48}, 4, 64),
    ],
)
def test_slots_are_rounded_up(settings, ranks, slots):
    wanted = config(**settings)
    assert n_slots(wanted, MODEL, ranks) == slots
    placement = initial_placement(wanted, MODEL, ranks)
    assert placement.n_slots == slots and placement.slots_per_rank == slots // ranks
    assert placement.slot_to_expert.tolist() == [[s % 16 for s in range(slots)]] * 5


def test_slots_that_make_no_sense():
    with pytest.raises(ValueError, match="makes 17 slots a rank, but a layer has 16 experts .* use at most 48"):
        n_slots(config(num_redundant_experts=49), MODEL, 4)
    with pytest.raises(ValueError, match="each has one slot and there is no spare one.* add --num-redundant-experts 16"):
        n_slots(config(), MODEL, 16)
    assert n_slots(config(enable_eplb=False), MODEL, 16) == 16
    with pytest.raises(ValueError, match="16 routed experts do not divide over 3"):
        initial_placement(config(enable_eplb=False), MODEL, 3)


@pytest.mark.parametrize("setting", [{}, {"enable_eplb": False, "num_redundant_experts": 2},
                                     {"enable_eplb": False, "expert_distribution_recorder_mode": "stat"}])  # fmt: skip
def test_dense_models_are_refused(setting):
    with pytest.raises(ValueError, match="is about experts, but no layer of the model has any; leave it out"):
        check_model(config(**setting), SimpleNamespace(moe=None))
    check_model(config(**setting), MODEL)
    check_model(config(enable_eplb=False), SimpleNamespace(moe=None))


# ---- where experts begin


def test_a_map_of_all_layers_or_of_those_with_experts(tmp_path):
    rng = np.random.default_rng(3)
    table = np.stack([np.concatenate([rng.permutation(16), rng.integers(0, 16, 4)]) for _ in range(4)])
    whole = np.concatenate([np.arange(20)[None] % 16, table])
    for name, rows in (("four.json", table), ("five.json", whole)):
        (tmp_path / name).write_text(json.dumps({"physical_to_logical_map": rows.tolist()}))
        found = initial_placement(config(num_redundant_experts=4, init_expert_location=str(tmp_path / name)), MODEL, 4)
        assert found.slot_to_expert[sparse_layers(MODEL)].tolist() == table.tolist()
    inline = json.dumps({"physical_to_logical_map": table.tolist()})
    assert (
        initial_placement(config(num_redundant_experts=4, init_expert_location=inline), MODEL, 4).local_experts(2, 1)
        == table[1, 5:10].tolist()
    )
    torch.save({"physical_to_logical_map": torch.from_numpy(table)}, tmp_path / "map.pt")
    found = initial_placement(config(num_redundant_experts=4, init_expert_location=str(tmp_path / "map.pt")), MODEL, 4)
    assert found.slot_to_expert[sparse_layers(MODEL)].tolist() == table.tolist()


def test_a_recorded_load_is_planned_for(tmp_path):
    counts = np.ones((6, 4, 16), dtype=np.int64)
    counts[:, :, 5] = 90
    torch.save({"logical_count": torch.from_numpy(counts)}, tmp_path / "load.pt")
    found = initial_placement(config(num_redundant_experts=4, init_expert_location=str(tmp_path / "load.pt")), MODEL, 4)
    assert (found.counts()[sparse_layers(MODEL), 5] >= 3).all()


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        ([[*range(16), 0, 1, 2, 3]] * 4, {}, "places 20 slots, but there are 16; use --num-redundant-experts 4"),
        ([[*range(16), 0, 1, 2, 3]] * 3, {"num_redundant_experts": 4}, "has 3 layers; the model has 5, of which 4 have experts: 1 to 4"),
        ([[*range(15), 0, 0, 1, 2, 3]] * 4, {"num_redundant_experts": 4}, "no slot for expert 15"),
        ([[*range(16), 16, 1, 2, 3]] * 4, {"num_redundant_experts": 4}, "16"),
    ],
)
def test_maps_that_do_not_fit(table, settings, message):
    text = json.dumps({"physical_to_logical_map": table})
    with pytest.raises(ValueError, match=message):
        initial_placement(config(init_expert_location=text, **settings), MODEL, 4)


@pytest.mark.parametrize("where", ["nowhere.json", "", "long" * 100])
def test_a_map_that_is_not_there(where):
    with pytest.raises(ValueError, match="is neither 'trivial', nor JSON, nor a file that is there"):
        initial_placement(config(init_expert_location=where), MODEL, 4)


def test_a_map_of_other_layers(tmp_path):
    """Its file numbers them, so they are not taken for others."""
    found = ExpertMap(slot_to_expert=np.tile(np.arange(16), (4, 1)), n_experts=16, layer_ids=(10, 11, 12, 13))
    path = write_map(found, tmp_path / "map.jsonl")
    with pytest.raises(ValueError, match=r"is about layers \[10, 11, 12, 13\]; the layers with experts are \[1, 2, 3, 4\]"):
        initial_placement(config(init_expert_location=str(path)), MODEL, 4)


def test_the_topology_has_the_nodes_of_the_ranks():
    found = expert_topology(GridSpec(dp=4), (0, 0, 1, 1), 20)
    assert found.slots == (5, 5, 5, 5) and found.nodes == (0, 0, 1, 1)
    assert uses_placement(config()) and not uses_placement(config(enable_eplb=False))


def test_kinds_of_steps():
    from rorqual.engine.eplb.steps import phase_of

    def plan(counts, samples):
        n = len(counts)
        zeros = np.zeros(n, dtype=np.int32)
        return StepPlan(step=0, slots=zeros, starts=zeros, counts=np.array(counts, np.int32), samples=np.array(samples, np.bool_))

    assert phase_of(plan([1, 1], [True, True])) == "decode"
    assert phase_of(plan([7, 3], [False, True])) == "prefill" and phase_of(plan([1], [False])) == "prefill"
    assert phase_of(plan([1, 3], [True, True])) == "mixed" and phase_of(plan([], [])) == "mixed"
