"""Three hosts, two ranks each, serve; one is cut off; the job is started again.

    python -m tests.launch.nodes.serving_hosts [--cut 0|1|2] [--rounds N]

Prints what was asked, how long each host took to end, and who was named.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.hosts import Host, Hosts, Running, until, why_not

DEADLINE_S = 8.0
LAYOUT = ("--dp-size", "6", "--num-redundant-experts", "2", "--dtype", "float32", "--max-model-len", "512", "--max-total-tokens", "4096")
ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "tiny", "prompt": sys.argv[2], "max_tokens": int(sys.argv[3]), "temperature": 0}).encode()
request = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def start(hosts: Hosts, *more: str, port: int = 8000) -> list[Running]:
    """``rorqual serve`` on all hosts."""
    common = ["serve", "tiny", *LAYOUT, "--dist-timeout", f"{DEADLINE_S:g}", "--nnodes", str(len(hosts.hosts)), "--node-timeout", "90"]
    common += ["--master-addr", hosts[0].address, "--port", str(port), *more]
    return [host.rorqual(*common, "--node-rank", str(number)) for number, host in enumerate(hosts)]


def await_ready(host: Host, running: Running, timeout: float, port: int = 8000) -> None:
    """Until the server on ``host`` answers /health with 200."""
    probe = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/health', timeout=10).status)"

    def ready() -> bool:
        assert running.process.poll() is None, running.text[-6000:]
        try:
            return "200" in host.run(sys.executable, "-c", probe)
        except Exception:  # not yet
            time.sleep(0.5)
            return False

    until(ready, timeout, lambda: running.text[-6000:])


def ask(host: Host, prompt: str, tokens: int, port: int = 8000) -> str:
    """The text that completes ``prompt``."""
    answer = json.loads(host.run(sys.executable, "-c", ASK, f"http://127.0.0.1:{port}", prompt, str(tokens), timeout=90))
    return str(answer["choices"][0]["text"])


def cut_and_wait(hosts: Hosts, running: list[Running], cut: int) -> list[float]:
    """Cut a host off -> seconds until each host's job had ended. AssertionError if one ends well, or too late."""
    hosts[cut].cut()
    begin = time.monotonic()
    seconds = []
    for process in running:
        code = process.wait(DEADLINE_S + 30)
        assert code != 0, process.text[-4000:]
        seconds.append(time.monotonic() - begin)
    return seconds


def names(text: str, host: Host) -> bool:
    """Whether a message of a failed job says that ``host`` is missing."""
    return any(f"{host.name} ({host.address}), no heartbeat" in line for line in text.splitlines() if "missing" in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cut", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"cannot run here: {reason}")
        return 1
    with Hosts(3) as hosts:
        for turn in range(args.rounds + 1):
            begin = time.monotonic()
            running = start(hosts)
            await_ready(hosts[0], running[0], 240)
            print(
                f"start {turn}: ready after {time.monotonic() - begin:.1f} s; 'Emma was' -> {ask(hosts[0], 'Emma was', 12)!r}", flush=True
            )
            if turn == args.rounds:
                break
            seconds = cut_and_wait(hosts, running, args.cut)
            told = [names(process.text, hosts[args.cut]) for number, process in enumerate(running) if number != args.cut]
            print(
                f"cut off {hosts[args.cut].name}: ended after {[round(s, 1) for s in seconds]} s, named by the others: {told}", flush=True
            )
            print("\n".join(line for line in running[args.cut].text.splitlines() if "cut off" in line), flush=True)
            hosts[args.cut].mend()
        for process in running:
            process.process.terminate()
        codes = [process.wait(60) for process in running]
        print(f"SIGTERM: exit codes {codes}")
        if any(codes):
            print("\n".join(f"--- {process.host.name}\n{process.text[-3000:]}" for process in running))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
