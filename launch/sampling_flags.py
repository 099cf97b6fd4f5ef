"""Flags of ``SamplingParams``. A test holds this table against the dataclass."""

from __future__ import annotations

import argparse
from typing import Any

from ..engine.sampling_params import SamplingParams

#: field -> (type, help); lists take several words, booleans are switches
SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Most tokens generated per completion."),
    "temperature": (float, "Divides the logits; 0 takes the highest one."),
    "top_p": (float, "Keep the smallest set of likeliest tokens that holds this probability."),
    "top_k": (int, "Keep this many likeliest tokens; 0 or -1 keeps all."),
    "min_p": (float, "Drop tokens less likely than this share of the likeliest one."),
    "n": (int, "Completions per prompt."),
    "stop": (list[str], "Strings that end the text."),
    "stop_token_ids": (list[int], "Token ids that end the text."),
    "min_tokens": (int, "No end token before this many tokens."),
    "ignore_eos": (bool, "Go on after the model's end token."),
    "presence_penalty": (float, "Taken once from the logit of every token generated so far, -2 to 2."),
    "frequency_penalty": (float, "Taken once per time a token was generated so far, -2 to 2."),
    "repetition_penalty": (float, "Divides logits of tokens in prompt and output; 1 is none."),
    "logprobs": (int, "Log-probabilities of this many alternatives per token (in --json and --output)."),
    "prompt_logprobs": (int, "The same for the tokens of the prompt."),
    "skip_special_tokens": (bool, "Leave special tokens out of the text."),
    "include_stop_str_in_output": (bool, "Let the text end with the stop string that was met."),
}
#: noise seed of the requests; ``--seed`` is the engine's, which also seeds requests
SEED_FLAG = "--sampling-seed"
#: the command line is for trying things out: greedy and a bit longer than the API's defaults
CLI_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags; none has a default, so that only what was given is in the namespace."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        default = CLI_DEFAULTS.get(name, getattr(SamplingParams, name))
        shown = text if default is None else f"{text} (default: {default})"
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": shown}
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif kind in (list[str], list[int]):
            word = str if kind == list[str] else int
            group.add_argument(flag, type=word, nargs="+", action="extend", metavar="TEXT" if word is str else "ID", **common)
        else:
            group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", **common)
    group.add_argument(
        SEED_FLAG,
        dest="sampling_seed",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="Noise seed of every request; from --seed by default.",
    )


def sampling_params(namespace: argparse.Namespace) -> SamplingParams:
    """``SamplingParams`` of what was given.

    Raises:
        ValueError: a value out of its range.
    """
    given = {name: getattr(namespace, name) for name in SAMPLING if hasattr(namespace, name)}
    if hasattr(namespace, "sampling_seed"):
        given["seed"] = namespace.sampling_seed
    return SamplingParams(**{**CLI_DEFAULTS, **given})
