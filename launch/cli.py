"""The command line: ``rorqual COMMAND ...``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from .. import __version__
from .config_file import as_arguments, read_config
from .errors import USER_ERRORS, tell
from .flags import Parser

#: command -> (module with add_parser and run, one line)
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": (".generate", "Complete prompts; under torchrun over several ranks."),
    "serve": (".serve", "An OpenAI server; under torchrun over several ranks, or with --nproc N."),
    "router": (".router_command", "One address for several OpenAI servers: each request goes where it costs least."),
    "inspect": (".inspect_command", "Architecture, parameters, bytes and memory per rank of a checkpoint."),
    "plan": (".plan_command", "Memory, largest batch and load of the link on machines that need not be there."),
    "doctor": (".doctor", "Versions, devices, and which backends are usable, or why not."),
    "bench throughput": (".bench.throughput", "Offline throughput, with vLLM's flags and JSON keys."),
    "bench latency": (".bench.latency", "Latency of one batch, and where a decode step's time goes."),
    "bench serve": (".bench.serve.command", "Load for any server with an OpenAI API, with vLLM's flags and JSON keys."),
    "bench server": (".bench.server.command", "What serving itself costs: HTTP streaming in front of a model that costs nothing."),
    "bench sweep": (".bench.sweep.command", "Servers of several layouts under several loads: throughput against latency."),
    "bench compare": (".bench.compare", "Two results, figure by figure: ratios of what belongs together, and whether they are noise."),
    "bench comm": (".bench.comm.command", "Dispatch and combine of every backend, their conformance, a step projected onto a cluster."),
    "bench eplb": (".bench.eplb.command", "Planners of expert placement against EPLB and against bounds; needs no GPU."),
    "bench eplb-gpu": (".bench.eplb_gpu.command", "Experts that change places on a GPU, and what the slowest rank of a step takes."),
    "bench kernels": (".bench.kernels_command", "Every CUDA kernel against its floor and its peers."),
    "bench kv keys": (".bench.kv.keys_command", "What formats of index keys find of the best keys; needs no GPU."),
    "bench kv link": (".bench.kv.link_command", "Rows fetched from host memory, by number, size, pool and order, against the link."),
    "bench kv policy": (".bench.kv.policy_command", "What replacement policies of the hot buffer miss; needs no GPU."),
    "bench kv rig": (".bench.kv.rig_command", "Attention of 61 layers with most rows in host memory, against all on the device."),
    "bench kv sac": (".bench.kv.sac_command", "Serving from cached prefixes: rows on demand, the whole prefix first, all on the device."),
    "bench multi-gpu": (".bench.multi_gpu.command", "What only several GPUs can show: parity, exchanges, throughput, one host pool."),
    "bench tune": (".bench.tune_command", "Measure and store the kernels' launch settings for this GPU."),
    "bench report": (".bench.report", "Result files as tables, served runs as one HTML page."),
    "eplb record": (".eplb.record_command", "Run a model and write the load of its experts, step by step."),
    "eplb synth": (".eplb.synth_command", "A made load with the skew, drift and noise of published ones."),
    "eplb analyze": (".eplb.analyze_command", "Is a load uneven, does it stay so, would a plan help?"),
    "eplb plan": (".eplb.plan_command", "Which expert each slot shall hold: from nothing, or moving little."),
    "eplb simulate": (".eplb.simulate_command", "A load replayed under policies, with what moving experts costs."),
    "eplb compare": (".eplb.compare_command", "Placements side by side on one load."),
    "eplb advise": (".eplb.advise_command", "How many slots for replicas a load needs, and their memory."),
    "eplb convert": (".eplb.convert_command", "Loads and maps between formats of SGLang, vLLM, TensorRT-LLM, EPLB and ours."),
    "eplb report": (".eplb.report_command", "A load, a plan and what they cost on one HTML page."),
}

Runner = Callable[[argparse.Namespace], int]


def overview(start: str = "") -> str:
    """What ``rorqual`` alone prints: the commands, or those whose names begin with ``start``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items() if name.startswith(start)]
    return (
        f"rorqual {__version__}: inference for DeepSeek-style models\n\n"
        "usage: rorqual COMMAND ...            (the same as python -m rorqual.launch COMMAND ...)\n"
        "       torchrun --nproc-per-node N -m rorqual.launch COMMAND ...\n\n"
        "commands:\n" + "\n".join(lines) + "\n\nrorqual COMMAND --help lists the flags of a command."
    )


def pick_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that ``words`` begin with, and the rest.

    Raises:
        ValueError: no such command; the known are listed.
    """
    inner = [name for name in COMMANDS if name.split()[0] == words[0] and name != words[0]]
    for size in (1, 2, 3):
        name = " ".join(words[:size])
        if name in COMMANDS and len(words) >= size:
            return name, list(words[size:])
    if inner:
        depth = 3 if any(name.startswith(" ".join(words[:2]) + " ") for name in COMMANDS) else 2
        asked = f"unknown command {' '.join(words[:depth])!r}" if len(words) > 1 else f"{words[0]!r} needs the name of what to run"
        raise ValueError(f"{asked}; known are: {', '.join(inner)}")
    raise ValueError(f"unknown command {words[0]!r}; known are: {', '.join(COMMANDS)}")


def parse(name: str, words: Sequence[str]) -> tuple[Runner, argparse.Namespace]:
    """The function that runs a command, and its arguments: those of ``--config FILE`` first, then the typed ones.

    Raises:
        ValueError: a wrong flag or value.
    """
    module = import_module(COMMANDS[name][0], __package__)
    parser = Parser(prog=f"rorqual {name}", description=COMMANDS[name][1])
    module.add_parser(parser)
    parser.add_argument("--config", metavar="FILE", help="Take flags from a JSON or YAML file; what is typed wins.")
    typed = parser.parse_args(words)
    if typed.config is not None:
        words = as_arguments(parser, read_config(typed.config), typed.config) + list(words)
        typed = parser.parse_args(words)
    run: Runner = module.run
    return run, typed


def _leave_word(error: Exception) -> None:
    """A rank that ends before it has met the others says so: those of other hosts would wait for it until their deadline."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        from ..parallel.grid import Grid

        Grid.decline_unmet(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a user's error, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    group = " ".join(words[:-1]) + " "
    if words[-1] in ("-h", "--help") and any(name.startswith(group) for name in COMMANDS):
        print(overview(group))
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    try:
        name, rest = pick_command(words)
        run, args = parse(name, rest)
        return run(args)
    except BrokenPipeError:  # the reader, such as `head`, has gone; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except USER_ERRORS as error:
        _leave_word(error)
        return tell(error)
    except KeyboardInterrupt:
        print("rorqual: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        _leave_word(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
