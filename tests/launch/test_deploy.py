"""The Slurm and Kubernetes examples: their syntax, and that every command in them is one that rorqual takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rorqual.engine.config import EngineConfig, check_config
from rorqual.launch.cli import parse, pick_command
from rorqual.launch.flags import chosen
from rorqual.launch.nodes.settings import NodeSettings, check_nodes, ranks_here

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "deploy"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
#: what the schedulers set, as the examples use it
SET = {
    "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "10.0.0.1", "POD_NAME": "rorqual-1",
    "SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_JOB_NODELIST": "n[0-3]", "MODEL": "/models/x",
}  # fmt: skip


def check_words(words: list[str]) -> tuple[NodeSettings, int]:
    """The nodes of a command and the ranks it starts on one. ValueError if a flag is unknown or numbers do not fit."""
    name, rest = pick_command(words)
    _, args = parse(name, rest)
    nodes = NodeSettings(**chosen(args, NodeSettings))
    check_nodes(nodes)
    if name != "serve":
        return nodes, int(nodes.nproc or 0)
    config = EngineConfig(model=args.model_name, **chosen(args, EngineConfig, skip=("model",)))
    check_config(config)
    world = config.pipeline_parallel_size * config.data_parallel_size * config.tensor_parallel_size
    return nodes, ranks_here(nodes, world)


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] == "LeaderWorkerSet":
        return list(document["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"])
    return list(document["spec"]["template"]["spec"]["containers"]) if document["kind"] == "StatefulSet" else []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= document.keys() for document in documents)
    found = [(document, container) for document in documents for container in containers(document)]
    assert len(found) == 1
    document, container = found[0]
    assert container["command"] == ["bash", "-c"]
    shown = subprocess.run(
        ["bash", "-euc", container["args"][0].replace("exec rorqual", "printf '%s\\n'")],
        env=SET,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert shown.returncode == 0 and not shown.stderr, shown.stderr
    nodes, ranks = check_words(shown.stdout.splitlines())
    spec = document["spec"]
    assert nodes.nnodes == (spec["leaderWorkerTemplate"]["size"] if document["kind"] == "LeaderWorkerSet" else spec["replicas"])
    assert ranks == int(container["resources"]["limits"]["nvidia.com/gpu"])
    mounts, volumes = {m["name"] for m in container["volumeMounts"]}, {v["name"] for v in pod_of(document)["volumes"]}
    assert mounts == volumes
    drain = float(re.search(r"--drain-timeout (\d+)", container["args"][0])[1])  # type: ignore[index]
    assert drain < pod_of(document)["terminationGracePeriodSeconds"]


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    pod = spec["leaderWorkerTemplate"]["workerTemplate"] if document["kind"] == "LeaderWorkerSet" else spec["template"]
    return dict(pod["spec"])


def test_the_slurm_script(tmp_path: Path) -> None:
    """Run with stand-ins for Slurm's commands: the commands it would run on a node are ones that rorqual takes."""
    script = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    said = tmp_path / "said"
    stubs = {
        "scontrol": "echo n0; echo n1",
        "srun": 'case "$*" in *hostname*) echo 10.0.0.1 10.0.0.2;; *) while [ "${1#--}" != "$1" ]; do shift; done; "$@";; esac',
        "rorqual": f'printf "%q " "$@" >> {said}; echo >> {said}',
    }
    for name, body in stubs.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        stub.chmod(0o755)
    env = {**SET, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    commands = [shlex.split(line) for line in said.read_text(encoding="utf-8").splitlines()]
    assert [words[0] for words in commands] == ["doctor", "serve"]
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", script.read_text(encoding="utf-8")))
    for words in commands:
        nodes, ranks = check_words(words)
        assert nodes.nnodes == int(asked["nodes"]) and nodes.node_rank == 3 and nodes.master_addr == "10.0.0.1"
        assert ranks == int(asked["gpus-per-node"])
