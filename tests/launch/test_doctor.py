"""The doctor names every backend, and a reason for each."""

import json

import pytest
import torch

from rorqual.comm.select import BACKENDS
from rorqual.launch import cli, doctor
from rorqual.launch.doctor_experts import expert_backends


def report(capsys) -> dict:
    assert cli.main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_report(capsys):
    found = report(capsys)
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["rorqual"]
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["cores"] >= 1 and found["devices"][0]["memory"] > 2**20
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    kinds = {row["kind"] for row in found["backends"]}
    assert kinds == {"device", "collectives", "comm", "attention", "moe", "fp8 gemm", "experts"}
    assert all(row["reason"] for row in found["backends"])
    usable = {(row["kind"], row["name"]) for row in found["backends"] if row["usable"]}
    assert {("device", "cpu"), ("attention", "torch"), ("fp8 gemm", "dequantise"), ("comm", "torch"), ("comm", "torch_node")} <= usable
    assert (("device", "cuda") in usable) == torch.cuda.is_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_auto_means_for_experts_is_said():
    rows = {name: (usable, reason) for _, name, usable, reason in expert_backends()}
    assert rows["auto"] == (True, "torch for CPU ranks of this host, torch_node for CPU ranks of 2 hosts")
    assert rows["shm"] == (True, "stores into the memory of 2 processes of one host") and not rows["symm"][0]
    assert set(rows) == {"local", *(set(BACKENDS) - {"local"})}


def test_what_this_version_lacks_is_said_with_every_reason(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "no_gpu_reason", lambda: "no GPU: none")
    rows = {(kind, name): (usable, reason) for kind, name, usable, reason in doctor.backends()}
    assert rows["fp8 gemm", "deep_gemm"] == (False, "deep_gemm is not installed (pip install --no-deps sgl-deep-gemm); no GPU: none")
    assert rows["device", "cuda"] == (False, "no GPU: none")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_reasons_for_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.no_gpu_reason() == "no GPU: this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_has_driver", lambda: False)
    assert doctor.no_gpu_reason().endswith("no driver (libcuda.so.1) was found")
    monkeypatch.setattr(doctor, "_has_driver", lambda: True)
    assert doctor.no_gpu_reason().endswith("the driver shows no device")


def test_text_report(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "usable  why" in out and "torch_static" in out and "GiB" in out
