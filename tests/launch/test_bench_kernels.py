"""``bench kernels`` and ``bench tune``: what can be shown without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from rorqual.launch import cli
from rorqual.launch.bench.kernels.case import Target
from rorqual.launch.bench.kernels.measure import target_us
from rorqual.launch.bench.kernels.roof import Roof
from rorqual.launch.bench.kernels.suite import all_cases
from rorqual.launch.bench.tune_command import _alike, render

ROOF = Roof(bytes_per_s=4e12, bf16_flops=8e14, fp8_flops=1.5e15)


def test_every_case_is_well_formed():
    cases = all_cases()
    names = [(case.op, case.name) for case in cases]
    assert len(names) == len(set(names)) and len(cases) >= 20
    for case in cases:
        assert case.n_bytes > 0 or case.flops > 0, case.name
        assert case.flops == 0 or case.unit != "none", case.name
        json.dumps([dict(case.params), dict(case.tune_shape or {})])
        if case.target is not None:
            given = [case.target.us, case.target.roof, case.target.peer]
            assert sum(value is not None for value in given) == 1, case.name


def test_only_picks_by_part_and_refuses_nothing():
    some = all_cases("topk,router")
    assert {case.op for case in some} and len(some) < len(all_cases())
    with pytest.raises(ValueError, match="no kernel case matches 'nonsense'; operations: "):
        all_cases("nonsense")


def test_the_floor_is_the_slower_of_bytes_and_flops():
    assert ROOF.floor_us(4e6, 0.0, "none") == pytest.approx(1.0)
    assert ROOF.floor_us(4e6, 8e9, "bf16") == pytest.approx(10.0)
    assert ROOF.floor_us(4e6, 1.5e10, "fp8") == pytest.approx(10.0)


def test_targets_become_microseconds():
    peers = {"a": 10.0, "b": 8.0}
    assert target_us(None, 1.0, peers) is None
    assert target_us(Target(us=3.0), 1.0, peers) == 3.0
    assert target_us(Target(roof=0.5), 1.0, peers) == 2.0
    assert target_us(Target(peer="a", ratio=0.5), 1.0, peers) == 20.0
    assert target_us(Target(peer="best", ratio=2.0), 1.0, peers) == 4.0
    assert target_us(Target(peer="c"), 1.0, peers) is None and target_us(Target(peer="best"), 1.0, {}) is None


def test_results_are_compared_by_rounding():
    a = torch.randn(100)
    assert _alike([a, torch.arange(3)], [a * 1.001, torch.arange(3)])
    assert not _alike([a], [a * 1.1]) and not _alike([torch.arange(3)], [torch.arange(1, 4)]) and not _alike([], [a])
    assert _alike([torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, float("inf")])])


def test_the_tuned_file_has_a_row_a_line():
    rows = {"b": [{"shape": {"m": 2}, "config": {"w": 4}, "us": 1.0}, {"shape": {"m": 1}, "config": {"w": 8}, "us": 2.0}], "a": []}
    text = render(rows)
    assert json.loads(text) == {"a": [], "b": rows["b"][::-1]}
    assert sum('"shape"' in line for line in text.splitlines()) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["kernels", "tune"])
def test_without_a_gpu_the_command_says_so(command, capsys):
    assert cli.main(["bench", command]) == 2
    assert f"bench {command} needs a CUDA device, found none" in capsys.readouterr().err


def test_list_needs_no_gpu(capsys):
    assert cli.main(["bench", "kernels", "--list"]) == 0
    assert capsys.readouterr().out.count("\n") == sum(not case.tune_only for case in all_cases())
