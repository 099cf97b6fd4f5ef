"""Launch settings by device and shape."""

from __future__ import annotations

import json

import pytest

from rorqual.parallel.kernels import tuned

ROWS = {
    "gemm": [
        {"shape": {"m": 64, "n": 4096, "fp8": True}, "config": {"tile": 1}, "us": 3.0},
        {"shape": {"m": 4096, "n": 4096, "fp8": True}, "config": {"tile": 2}, "us": 9.0},
        {"shape": {"m": 4096, "n": 4096, "fp8": False}, "config": {"tile": 3}, "us": 9.0},
    ]
}


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuned, "this_device", lambda: "some-gpu")
    tuned.table.cache_clear()
    tuned._nearest.cache_clear()
    yield tmp_path / "some-gpu.json"
    tuned.table.cache_clear()
    tuned._nearest.cache_clear()


def test_the_nearest_measured_shape_decides(device):
    device.write_text(json.dumps(ROWS))
    default = {"tile": 0, "warps": 4}
    assert tuned.config_for("gemm", default, m=50, n=4096, fp8=True) == {"tile": 1, "warps": 4}
    assert tuned.config_for("gemm", default, m=3000, n=7168, fp8=True) == {"tile": 2, "warps": 4}
    assert tuned.config_for("gemm", default, m=1, n=1, fp8=False) == {"tile": 3, "warps": 4}


def test_what_was_never_measured_gets_the_default(device):
    assert tuned.config_for("gemm", {"tile": 0}, m=1) == {"tile": 0}
    tuned.table.cache_clear()
    tuned._nearest.cache_clear()
    device.write_text(json.dumps(ROWS))
    assert tuned.config_for("other", {"tile": 0}, m=1) == {"tile": 0}
    assert tuned.config_for("gemm", {"tile": 0}, m=1, n=1, fp8="yes") == {"tile": 0}  # a name that no row has


def test_a_damaged_file_is_named(device):
    device.write_text("{")
    with pytest.raises(ValueError, match="some-gpu.json is not JSON .*run `rorqual bench tune`"):
        tuned.config_for("gemm", {}, m=1)


def test_slug():
    assert tuned.device_slug("NVIDIA H200") == "nvidia-h200"
