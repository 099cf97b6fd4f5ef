"""``rorqual plan``: parts that add up to the GPU, what is refused and why, and the numbers of a published model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rorqual.launch.cli import main
from tests.weights import published

H200 = ["--gpu-memory", "143156MiB", "--host-memory", "1000GiB"]


def planned(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def v32(tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp("v32")
    (folder / "config.json").write_text(json.dumps(published.V32))
    return str(folder)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2,dp2", "dp4 ep1"])
def test_parts_add_up_to_the_gpu(capsys, layout: str) -> None:
    found = planned(capsys, "tiny", "--gpu-memory", "3GB", "--host-memory", "6GiB", "--context", "4096", "--layout", layout)
    assert len(found["stages"]) == found["layout"]["pp"] and set(found["modes"]) == {"off", "host", "hybrid"}
    for stage in found["stages"]:
        for mode in stage["modes"].values():
            assert sum(stage["weights"].values()) + sum(mode["device"].values()) == mode["device_total"] == 3 * 10**9
            assert all(size >= 0 for size in mode["device"].values())
    for mode in found["modes"].values():
        assert mode["largest_batch_all"] == mode["largest_batch"] * found["layout"]["dp"]
        assert mode["pool_tokens"] == mode["pages"] * found["kv"]["page_size"]
    assert found["modes"]["host"]["largest_batch"] > found["modes"]["off"]["largest_batch"]


def test_deepseek_v32_on_eight_gpus(capsys, v32: str) -> None:
    found = planned(capsys, v32, *H200, "--context", "131072", "--layout", "dp8", "--kv-cache-dtype", "fp8")
    assert (found["kv"]["latent_row_bytes"], found["kv"]["index_row_bytes"], found["kv"]["hot_rows"]) == (656, 132, 4096)
    off, host = found["modes"]["off"], found["modes"]["host"]
    assert off["largest_batch"] == 4 and host["largest_batch"] == 24 and host["limited_by"] == "device memory for index keys"
    assert found["kv"]["most_hot_rows"] == 8192
    steps = [(step["requests"], step["rows"]) for step in host["hot_rows"]]
    assert steps[0][1] == 8192 and steps[-1] == (24, 4096) and steps == sorted(steps) and off["hot_rows"] == []
    parts = found["stages"][0]["modes"]["host"]["device"]
    assert parts["index keys"] == (host["pages"] + 1) * 64 * 132 * 61
    assert parts["latent rows"] == (host["device_pages"] + 1) * 64 * 656 * 61
    assert found["stages"][0]["modes"]["off"]["host_pool"] == 0 < found["stages"][0]["modes"]["host"]["host_pool"] <= 125 * 2**30
    load = next(load for load in found["link"] if load["miss_rate"] == 0.134)
    assert load["bytes_per_token"] == pytest.approx(10.98e6, rel=1e-3) and load["tokens_per_s"] == pytest.approx(4553, rel=1e-3)
    assert load["tokens_per_s_all"] == 8 * load["tokens_per_s"]
    assert load["batch_ms"] == pytest.approx(1e3 * 24 / load["tokens_per_s"])


def test_fp4_index_keys_make_room_for_more_requests(capsys, v32: str) -> None:
    asked = (v32, *H200[:3], "3000GiB", "--context", "131072", "--layout", "dp8", "--kv-cache-dtype", "fp8")
    wide, found = planned(capsys, *asked), planned(capsys, *asked, "--index-cache-dtype", "fp4")
    assert (wide["kv"]["index_dtype"], found["kv"]["index_dtype"], found["kv"]["index_row_bytes"]) == ("fp8", "fp4", 68)
    assert found["kv"]["latent_row_bytes"] == 656
    host = found["modes"]["host"]
    assert found["stages"][0]["modes"]["host"]["device"]["index keys"] == (host["pages"] + 1) * 64 * 68 * 61
    assert wide["modes"]["host"]["limited_by"] == "device memory for index keys"
    assert host["largest_batch"] > 1.5 * wide["modes"]["host"]["largest_batch"]


def test_the_workspace_of_experts_counts(capsys, v32: str) -> None:
    """Rows there and back of 8 ranks x 4096 tokens, and their choices; halves of a step need half of it twice, FP8 rows less."""

    def part(*more: str) -> int:
        args = (*H200, "--context", "8192", "--layout", "dp8", "--kv-cache-dtype", "fp8", *more)
        size: int = planned(capsys, v32, *args)["stages"][0]["modes"]["off"]["device"].get("expert exchange", 0)
        return size

    whole = 8 * 4096 * (2 * 14336 + 16 * 8)
    assert whole < part() < whole + 4096 and abs(part("--enable-two-batch-overlap") - part()) < 8192
    assert part("--moe-payload", "fp8") == part() - 8 * 4096 * (14336 - 7168 - 224)
    assert part("--moe-a2a-backend", "torch") == 0


def test_stages_of_a_pipeline_share_their_number_of_pages(capsys, v32: str) -> None:
    found = planned(capsys, v32, *H200, "--context", "65536", "--layout", "pp2,dp4", "--kv-cache-dtype", "fp8", "--max-num-seqs", "16")
    assert [stage["layers"] for stage in found["stages"]] == [[0, 30], [30, 61]]
    assert found["modes"]["hybrid"]["largest_batch"] == 16 and found["modes"]["hybrid"]["limited_by"] == "max_num_seqs"
    assert found["link"][0]["bytes_per_token"] == pytest.approx(0.067 * 2048 * 31 * 656)


def test_text(capsys, v32: str) -> None:
    assert main(["plan", v32, *H200, "--context", "131072", "--layout", "dp8", "--kv-cache-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    for line in (
        "contexts of 131,072 tokens on pp 1, dp 8, tp 1, ep 8",
        "Memory of a rank of stage 0, layers 0-60",
        "weights: routed experts",
    ):
        assert line in out
    rows = {line.split("  ")[1].strip(): line.split()[-3:] for line in out.splitlines() if line.startswith("  ")}
    assert rows["largest batch at 131,072"] == ["4", "24", "24"]
    assert "hot rows of each request, offload host and hybrid: 8,192 up to 1" in out and "4,096 up to 24 requests" in out
    assert rows["13.4%"][-3:] == ["36,424", "5.27", "ms"]


def test_a_way_that_does_not_fit_says_why_beside_those_that_do(capsys) -> None:
    words = ["tiny", "--gpu-memory", "1GB", "--host-memory", "1MiB", "--context", "4096"]
    found = planned(capsys, *words)
    assert found["modes"]["host"] is None and found["stages"][0]["modes"]["host"] is None
    assert found["modes"]["off"]["largest_batch"] > 1
    assert "kv_host_memory" in found["refused"]["host"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "offload hybrid: the host pool has no room" in out and "ink" not in out


@pytest.mark.parametrize("backing", ["pinned", "shm", "file", "cxl"])
def test_every_backing_can_be_planned(capsys, backing: str) -> None:
    """The file or the CXL device need not be there, nor be named."""
    words = ["tiny", "--gpu-memory", "2GB", "--host-memory", "1GiB", "--context", "1024", "--layout", "dp2", "--kv-host-backing", backing]
    found = planned(capsys, *words)
    assert found["machine"]["host_backing"] == backing and not found["refused"]
    pool, pages = found["stages"][0]["modes"]["host"]["host_pool"], found["modes"]["host"]["pages"]
    assert 0 < pool <= 2**30 // (1 if backing in ("shm", "file") else 2) + (2 << 20) and pages > 0


def test_hosts_of_a_pipeline_pool_their_own_layers(capsys, v32: str) -> None:
    words = [v32, *H200, "--context", "65536", "--layout", "pp2,dp8", "--kv-cache-dtype", "fp8", "--max-num-seqs", "16"]
    one, two = (planned(capsys, *words, "--kv-host-backing", "shm", "--ranks-per-node", n)["stages"] for n in ("16", "8"))
    sizes = [[stage["modes"]["host"]["host_pool"] for stage in stages] for stages in (one, two)]
    assert sizes[0][0] == sizes[0][1] > sizes[1][1] > sizes[1][0]


def test_more_requests_than_a_step_fetches_for(capsys) -> None:
    words = ["tiny", "--gpu-memory", "8GB", "--host-memory", "8GiB", "--context", "512"]
    assert "at most 1024 requests" in planned(capsys, *words, "--max-num-seqs", "1025")["refused"]["host"]
    modes = planned(capsys, *words)["modes"]
    assert modes["host"]["max_num_seqs"] == 1024 and modes["off"]["max_num_seqs"] > 1024


def test_short_contexts_use_no_link(capsys) -> None:
    found = planned(capsys, "tiny", "--gpu-memory", "2GB", "--host-memory", "1GiB", "--context", "128")
    assert found["link"] == []
    assert main(["plan", "tiny", "--gpu-memory", "2GB", "--host-memory", "1GiB", "--context", "128"]) == 0
    assert "The link carries no rows: contexts of 128 tokens are read whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "1000000"], "--context 1000000 is more than the model's 8192 positions"),
        (["--context", "1"], "--context must be at least 2 tokens"),
        (["--context", "64", "--layout", "tp3"], "does not divide over tensor_parallel_size 3"),
        (["--context", "64", "--layout", "x"], "write degrees of pp, dp, tp and ep once each"),
        (["--context", "64", "--link-gbs", "0"], "--link-gbs must be above 0"),
        (["--context", "64", "--gpu-memory", "much"], "is no amount of memory"),
        (["--context", "64", "--gpu-memory", "100MB"], "the weights of a rank take"),
    ],
)
def test_wrong_numbers_are_refused(capsys, words: list[str], message: str) -> None:
    assert main(["plan", "tiny", "--gpu-memory", "1GB", "--host-memory", "1GB", *words]) == 2
    assert message in capsys.readouterr().err
