"""``bench serve`` against a server of known behaviour, over real sockets: what is sent, when, and what the figures then are."""

import json
import time

import pytest

from rorqual.launch import cli
from rorqual.launch.bench.results import read_results
from tests.launch.serve.fake_server import FakeServer, completions, event

SIZES = ["--num-prompts", "12", "--input-len", "5", "--output-len", "4", "--dataset", "random-ids", "--disable-tqdm"]


def bench(server, tmp_path, *words, code=0):
    file = tmp_path / "r.json"
    target = ["--port", str(server.port), "--result-filename", str(file), "--save-detailed"]
    assert cli.main(["bench", "serve", *SIZES, *target, *words]) == code
    return json.loads(file.read_text())


def test_counts_keys_and_what_is_sent(tmp_path, capsys):
    with FakeServer(routes={"POST /flush_cache": (200, {}), "GET /version": (200, {"version": "1", "device": "x"})}) as server:
        got = bench(server, tmp_path, "--extra-body", '{"priority": 3}', "--metadata", "layout=tp8", "tag=a", "--logprobs", "2")
    assert (got["completed"], got["failed"], got["total_input_tokens"], got["total_output_tokens"]) == (12, 0, 60, 48)
    for key, count in (("request_throughput", 12), ("output_throughput", 48), ("total_token_throughput", 108)):
        assert got[key] == pytest.approx(count / got["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert all(got[f"{word}_{name}_ms"] is not None for word in ("mean", "median", "std", "p50", "p90", "p95", "p99"))
    assert got["input_lens"] == [5] * 12 and got["output_lens"] == [4] * 12 and got["errors"] == [""] * 12
    assert all(len(gaps) == 3 for gaps in got["itls"]) and got["generated_texts"][0] == "w0 w1 w2 w3 "
    assert got["layout"] == "tp8" and got["tag"] == "a" and got["device"] == "x" and got["request_rate"] == "inf"
    assert got["versions"]["rorqual"] and got["command"].startswith("rorqual") and got["model_id"] == "fake"
    test, *load = server.bodies
    assert test["max_tokens"] == 1 and len(load) == 12
    assert all(
        b["max_tokens"] == 4 and b["priority"] == 3 and b["ignore_eos"] and b["logprobs"] == 2 and b["temperature"] == 0 for b in load
    )
    assert all(b["stream"] and b["stream_options"] == {"include_usage": True} and b["model"] == "fake" for b in load)
    assert test["prompt"] == load[0]["prompt"][::-1], "the first request must not warm the cache for a measured one"
    assert server.calls.index("POST /flush_cache") < len(server.calls) - 12
    assert "warning" not in capsys.readouterr().out


def test_a_server_without_the_route_to_forget_is_told_of(tmp_path, capsys):
    with FakeServer() as server:
        bench(server, tmp_path)
        assert {"POST /flush_cache", "POST /reset_prefix_cache"} <= set(server.calls)
        assert "no route to forget cached prefixes" in capsys.readouterr().out
        server.calls.clear()
        bench(server, tmp_path, "--no-flush-cache")
        assert "POST /flush_cache" not in server.calls and "warning" not in capsys.readouterr().out


def test_warm_up_is_not_counted_and_has_other_prompts(tmp_path):
    with FakeServer() as server:
        got = bench(server, tmp_path, "--num-warmups", "5", "--ready-check-timeout-sec", "0")
    assert got["completed"] == 12 and len(server.bodies) == 17
    warm, timed = server.bodies[:5], server.bodies[5:]
    prompts = [b["prompt"] for b in timed]
    assert all(b["prompt"] not in prompts and b["prompt"][::-1] in prompts for b in warm)


def test_chat(tmp_path):
    words = ["--backend", "openai-chat", "--dataset", "random", "--tokenizer", "tiny"]
    with FakeServer() as server:
        got = bench(server, tmp_path, *words)
    body = server.bodies[-1]
    assert body["messages"][0]["role"] == "user" and body["max_completion_tokens"] == 4 and "ignore_eos" not in body
    assert got["output_lens"] == [4] * 12 and all(len(gaps) == 3 for gaps in got["itls"]), "the chunk with the role is no token"
    assert "POST /v1/chat/completions" in server.calls


def test_chat_needs_text(tmp_path, capsys):
    with FakeServer() as server:
        assert cli.main(["bench", "serve", *SIZES, "--port", str(server.port), "--backend", "openai-chat"]) == 2
    assert "give --tokenizer FOLDER" in capsys.readouterr().err


def test_failed_requests_count_for_nothing_but_that(tmp_path, capsys):
    def script(body):
        if body["max_tokens"] > 1 and body["prompt"][0] % 2:
            return completions(body)[:2]  # it breaks off: no reason, no usage
        return completions(body)

    with FakeServer(script) as server:
        got = bench(server, tmp_path)
    odd = sum(b["prompt"][0] % 2 for b in server.bodies[1:])
    assert 0 < odd < 12 and (got["completed"], got["failed"]) == (12 - odd, odd) and got["num_prompts"] == 12
    assert got["total_output_tokens"] == 4 * (12 - odd) and list(got["error_counts"].values()) == [odd]
    assert f"failed, {odd} x: the stream ended without a finish_reason" in capsys.readouterr().out


def test_connections_that_break_are_failures_and_the_exit_code_says_that_nothing_worked(tmp_path):
    with FakeServer(cut=True, script=lambda body: completions(body)[:3]) as server:
        got = bench(server, tmp_path, "--ready-check-timeout-sec", "0", code=1)
    assert got["failed"] == 12 and "closed the connection" in got["errors"][0]
    assert got["mean_ttft_ms"] is None, "no figure at all, rather than a 0 that looks like a good one"


def test_ready_check_waits_for_the_model_and_gives_up_in_time(tmp_path, capsys):
    with FakeServer(busy=2) as server:
        assert bench(server, tmp_path)["completed"] == 12
    with FakeServer(busy=10**6) as server:
        start = time.monotonic()
        assert cli.main(["bench", "serve", *SIZES, "--port", str(server.port), "--ready-check-timeout-sec", "1"]) == 2
        assert time.monotonic() - start < 20
    assert "did not complete a first request of one token: HTTP 503: loading" in capsys.readouterr().err
    assert cli.main(["bench", "serve", *SIZES, "--port", "1", "--ready-check-timeout-sec", "0"]) == 2
    assert "no server at 127.0.0.1:1 within 0 s; last: no connection" in capsys.readouterr().err


def test_a_request_that_takes_too_long_has_failed(tmp_path):
    with FakeServer(lambda body: completions(body, wait=30.0 if body["max_tokens"] > 1 else 0.0)) as server:
        got = bench(server, tmp_path, "--request-timeout-s", "0.3", code=1)
    assert got["failed"] == 12 and "no whole response within 0.3 s" in got["errors"][0]


def test_waiting_in_the_client_is_told_apart(tmp_path):
    with FakeServer(lambda body: completions(body, wait=0.05)) as server:
        got = bench(server, tmp_path, "--max-concurrency", "3")
    assert got["max_concurrent_requests"] <= 3 and got["concurrency"] <= 3.01
    assert got["mean_client_queue_time_ms"] > 30 and sorted(got["queue_times"])[2] < 0.05 < got["queue_times"][-1]
    assert got["mean_e2el_including_client_queue_ms"] > got["mean_e2el_ms"] + 30
    assert got["mean_ttft_ms"] >= 45, "the wait of the server is in it"


def test_goodput(tmp_path):
    def script(body):
        return completions(body, wait=0.4 if body["prompt"][0] % 2 else 0.0)

    with FakeServer(script) as server:
        got = bench(server, tmp_path, "--goodput", "ttft:390", "e2el:30000")
        slow = sum(b["prompt"][0] % 2 for b in server.bodies[1:])
    assert 0 < slow < 12 and got["request_goodput"] * got["duration"] <= 12 - slow + 1e-6
    assert got["request_throughput"] * got["duration"] == pytest.approx(12)


def test_conversations_go_on_from_the_answers(tmp_path):
    talk = [
        "--dataset",
        "multi-turn",
        "--multi-turn-num-conversations",
        "2",
        "--multi-turn-num-turns",
        "3",
        "--multi-turn-context-len",
        "6",
    ]
    with FakeServer(lambda body: completions(body, wait=0.02)) as server:
        got = bench(server, tmp_path, *talk, "--multi-turn-turn-len", "2", "--multi-turn-output-len", "3", "--ready-check-timeout-sec", "0")
    assert got["completed"] == 6 and got["input_lens"] == [6, 11, 16] * 2
    assert all(b["return_token_ids"] for b in server.bodies)
    for first in (b["prompt"] for b in server.bodies if len(b["prompt"]) == 6):
        (second,) = [b["prompt"] for b in server.bodies if len(b["prompt"]) == 11 and b["prompt"][:6] == first]
        assert second[6:9] == [0, 1, 2], "the answer's own tokens"
    for turn in (1, 2, 4, 5):
        assert got["start_times"][turn] >= got["start_times"][turn - 1] + got["latencies"][turn - 1]


def test_conversations_of_ids_need_the_ids_of_answers(tmp_path, capsys):
    talk = [
        "--dataset",
        "multi-turn",
        "--multi-turn-num-conversations",
        "3",
        "--multi-turn-num-turns",
        "3",
        "--ready-check-timeout-sec",
        "0",
    ]
    with FakeServer(lambda body: completions({**body, "return_token_ids": False})) as server:
        got = bench(server, tmp_path, *talk, code=1)
    assert len(server.bodies) == 3 and "the next turn needs the answer's token ids" in got["errors"][0]
    assert "6 later turns of conversations were never asked" in capsys.readouterr().out


def test_prompts_of_ids_are_counted_where_the_server_does_not(tmp_path):
    with FakeServer(lambda body: completions(body, prompt_tokens=0)) as server:
        assert bench(server, tmp_path)["total_input_tokens"] == 60


def test_conversations_in_text(tmp_path):
    talk = [
        "--dataset",
        "multi-turn",
        "--multi-turn-num-conversations",
        "1",
        "--multi-turn-num-turns",
        "2",
        "--multi-turn-context-len",
        "6",
    ]
    talk += ["--multi-turn-turn-len", "2", "--multi-turn-output-len", "3", "--tokenizer", "tiny", "--ready-check-timeout-sec", "0"]
    with FakeServer() as server:
        assert bench(server, tmp_path, *talk)["completed"] == 2
        assert bench(server, tmp_path, *talk, "--backend", "openai-chat")["completed"] == 2
    plain, chat = server.bodies[:2], server.bodies[2:]
    assert plain[1]["prompt"].startswith(plain[0]["prompt"] + "w0 w1 w2 ") and len(plain[1]["prompt"]) > len(plain[0]["prompt"]) + 9
    assert [m["role"] for m in chat[1]["messages"]] == ["user", "assistant", "user"] and chat[1]["messages"][1]["content"] == "w0 w1 w2 "


def test_a_trace_is_replayed_at_its_times(tmp_path):
    file = tmp_path / "t.jsonl"
    lines = [{"timestamp": t, "input_length": 4, "output_length": 2, "hash_ids": [1]} for t in (0, 400, 1600)]
    file.write_text("\n".join(map(json.dumps, lines)))
    with FakeServer() as server:
        got = bench(server, tmp_path, "--dataset", "mooncake", "--dataset-path", str(file), "--request-rate", "1000")
    a, b, c = got["start_times"]  # from the first send, which a slow machine makes late
    assert a < 0.05 and b >= 0.38 and c >= 1.58 and got["duration"] >= 1.58


def test_probes_are_reported_apart(tmp_path, capsys):
    with FakeServer(lambda body: completions(body, wait=0.05)) as server:
        got = bench(server, tmp_path, "--max-concurrency", "2", "--probe-request-rate", "50")
    assert got["probe_completed"] >= 2 and got["completed"] == 12 and got["max_concurrent_requests"] <= 2
    assert sum(b["max_tokens"] == 1 for b in server.bodies) >= got["probe_completed"]
    assert "Probes of one token" in capsys.readouterr().out


def test_files(tmp_path, capsys):
    with FakeServer() as server:
        base = [
            "bench",
            "serve",
            *SIZES,
            "--port",
            str(server.port),
            "--result-dir",
            str(tmp_path / "d"),
            "--results-dir",
            str(tmp_path / "p"),
        ]
        for _ in range(2):
            assert cli.main([*base, "--append-result", "--result-filename", "a.jsonl"]) == 0
        assert cli.main([*base, "--save-result", "--max-concurrency", "4", "--label", "x"]) == 0
    assert len((tmp_path / "d" / "a.jsonl").read_text().splitlines()) == 2
    (named,) = (tmp_path / "d").glob("x-infqps-concurrency4-fake-*.json")
    assert "ttfts" not in json.loads(named.read_text())
    rows = read_results(sorted((tmp_path / "p").iterdir())[0]).rows
    assert {"served, output throughput", "served, p99 ttft ms"} <= {row.name for row in rows}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goodput", "itl:5"], "--goodput takes NAME:MS with a name of ttft, tpot, e2el"),
        (["--metric-percentiles", "50,101"], "--metric-percentiles takes numbers from 0 to 100"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics takes ttft, tpot, itl, e2el"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be above 0"),
        (["--burstiness", "-1"], "--burstiness must be above 0"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object, found list"),
        (["--metadata", "x"], "--metadata takes KEY=VALUE, found 'x'"),
        (["--header", "a=b\nc: d"], "no HTTP header may have"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-end-rps", "3"], "need --ramp-up-strategy"),
        (["--base-url", "localhost:8000"], "is no URL of a server; write http://HOST:PORT"),
        (["--base-url", "http://h:99999"], "is no URL of a server"),
    ],
)
def test_wrong_settings_are_named(words, message, capsys):
    assert cli.main(["bench", "serve", *SIZES, *words]) == 2
    assert message in capsys.readouterr().err


def test_the_model_that_is_named_is_asked_for(tmp_path):
    models = {"GET /v1/models": (200, {"data": [{"id": "a", "vocab_size": 50}, {"id": "b", "vocab_size": 60}]})}
    with FakeServer(routes=models) as server:
        for words, name in (([], "a"), (["b"], "b"), (["--model", "b"], "b"), (["tiny"], "a"), (["--served-model-name", "c"], "c")):
            server.bodies.clear()
            bench(server, tmp_path, *words)
            assert {b["model"] for b in server.bodies} == {name}


def test_error_events_in_the_stream(tmp_path):
    def script(body):
        return [(0.0, event({"error": {"message": "rank 1 is gone"}}))] if body["max_tokens"] > 1 else completions(body)

    with FakeServer(script) as server:
        got = bench(server, tmp_path, code=1)
    assert got["error_counts"] == {"the server says: rank 1 is gone": 12}
