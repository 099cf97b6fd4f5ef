"""The benchmark of planners: its rows, its bound by linear programming, its flags."""

import json

import numpy as np
import pytest

from rorqual.launch.bench.eplb.cases import Machine, skewed_load
from rorqual.launch.bench.eplb.command import LP_BOUNDS
from rorqual.launch.bench.eplb.partner_lp import partner_bound
from rorqual.launch.bench.eplb.static_rows import machine_rows, small_rows
from rorqual.launch.cli import main
from rorqual.moe.eplb.planner.bounds import bound
from rorqual.moe.eplb.planner.static import plan_static


def test_load_has_the_published_skew() -> None:
    load = skewed_load()
    assert (load.max(1) / load.mean(1)).mean() == pytest.approx(10.26, abs=0.01)


def test_small_rows_meet_their_targets() -> None:
    rows = small_rows()
    assert [row.met for row in rows] == [True, True, True]
    assert [row.peers["EPLB"] for row in rows] == [156.0, 179.5, 232.0]


def test_machine_rows_have_a_peer_in_the_same_run() -> None:
    machine = Machine(n_slots=288, n_ranks=144, n_nodes=18, target=None, gap=0.005)
    rows = machine_rows(machine, tries=1, proven={"288-144": np.full(58, 1.01)})
    assert all(row.peers for row in rows)
    assert rows[0].peers["EPLB"] == pytest.approx(1.3191, abs=1e-4)
    assert rows[2].params["bound"] == "quick and linear programming"


def test_linear_programming_is_tighter_and_still_a_bound() -> None:
    pytest.importorskip("scipy")
    machine = Machine(n_slots=36, n_ranks=18, n_nodes=1, target=None)
    load = skewed_load(2, 32, seed=5)
    plan = plan_static(load, machine.topology)
    for layer in range(2):
        low, high = float(bound(load, machine.topology)[layer]), float(plan.imbalance[layer])
        proven = partner_bound(load[layer], n_ranks=18, width=2, low=low, high=high)
        assert low <= proven <= high + 1e-9


def test_flags_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "eplb", "--tries", "0"]) != 0
    assert "--tries 0" in capsys.readouterr().err


def test_stored_bounds_are_bounds() -> None:
    pytest.importorskip("scipy")
    stored = json.loads(LP_BOUNDS.read_text(encoding="utf-8"))
    assert {name: len(values) for name, values in stored.items()} == {"288-96": 58, "288-144": 58, "320-160": 58}
    load, layer = skewed_load(), 12
    again = partner_bound(load[layer], n_ranks=144, width=2, low=1.76, high=1.78)
    assert stored["288-144"][layer] == pytest.approx(again, abs=4e-4)
    for name, values in stored.items():
        n_slots, n_ranks = (int(number) for number in name.split("-"))
        plan = plan_static(load, Machine(n_slots=n_slots, n_ranks=n_ranks, n_nodes=1, target=None).topology)
        assert (np.array(values) <= plan.imbalance + 1e-9).all()
