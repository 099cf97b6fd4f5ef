"""Flags are generated from the dataclasses: every field has one, aliases work, files give defaults."""

import json
from dataclasses import dataclass, fields
from typing import get_origin

import pytest

from rorqual.engine.config import EngineConfig, option
from rorqual.engine.option import flag_of
from rorqual.engine.sampling_params import SamplingParams
from rorqual.launch import cli
from rorqual.launch.flags import SPELLINGS, Parser, add_options, add_spellings, chosen, value_type
from rorqual.launch.sampling_flags import CLI_DEFAULTS, SAMPLING, add_sampling, sampling_params


def engine_parser() -> Parser:
    parser = Parser(prog="rorqual test")
    add_options(parser, EngineConfig)
    add_spellings(parser)
    return parser


def engine_settings(*words: str) -> dict:
    return chosen(engine_parser().parse_args(words), EngineConfig)


def test_nothing_given_leaves_every_default_to_the_dataclass():
    assert engine_settings() == {}
    assert EngineConfig(**engine_settings()) == EngineConfig()


def test_every_engine_field_has_a_flag_with_its_type():
    sample = {bool: None, int: "3", float: "0.5", str: "x"}
    for entry in fields(EngineConfig):
        annotation = EngineConfig.__dataclass_fields__[entry.name].type
        kind, _ = value_type(eval(annotation))  # annotations are strings here
        if kind is bool:
            assert engine_settings(flag_of(entry.name)) == {entry.name: True}
            assert engine_settings("--no-" + flag_of(entry.name)[2:]) == {entry.name: False}
            continue
        if get_origin(kind) is tuple:
            assert engine_settings(flag_of(entry.name), "1", "2") == {entry.name: [1, 2]}
            continue
        word = entry.metadata["choices"][-1] if entry.metadata["choices"] else sample[kind]
        for flag in (flag_of(entry.name), *entry.metadata["aliases"]):
            assert engine_settings(flag, word) == {entry.name: kind(word)}, flag


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-tp", "2", "-pp", "3", "-dp", "4", "-ep", "8"], (2, 3, 4, 8)),
        (["--tp-size", "2", "--pp-size", "3", "--dp-size", "4", "--ep-size", "8"], (2, 3, 4, 8)),
        (["--tensor-parallel-size=2", "--pipeline-parallel-size=3", "--data-parallel-size=4", "--expert-parallel-size=8"], (2, 3, 4, 8)),
    ],
)
def test_degrees_take_both_systems_spellings(words, expected):
    got = EngineConfig(**engine_settings(*words))
    assert (got.tensor_parallel_size, got.pipeline_parallel_size, got.data_parallel_size, got.expert_parallel_size) == expected


def test_spellings_of_other_systems():
    assert engine_settings("--disable-radix-cache") == {"enable_prefix_caching": False}
    assert engine_settings("--random-seed", "7") == {"seed": 7}
    for spelling in SPELLINGS:
        expected = {} if spelling.field is None else {spelling.field: spelling.value}
        assert engine_settings(spelling.flag) == expected


def test_the_last_of_two_contradicting_flags_wins():
    assert engine_settings("--disable-radix-cache", "--enable-prefix-caching") == {"enable_prefix_caching": True}


def test_help_shows_help_defaults_and_percent_signs():
    @dataclass(frozen=True, kw_only=True)
    class Config:
        share: float = option(0.5, "At most 100% of it.", "--part")
        name: str | None = option(None, "A name.", group="other")
        fast: bool = option(True, "Hurry.")

    parser = Parser(prog="p")
    add_options(parser, Config)
    text = " ".join(parser.format_help().split())
    assert "--share X, --part X At most 100% of it. (default: 0.5)" in text
    assert "--name TEXT A name." in text and "A name. (default" not in text
    assert "--fast, --no-fast Hurry. (default: on)" in text
    assert "other:" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--page-size", "many"], "argument --page-size/--block-size: invalid int value: 'many'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--page"], "unrecognized arguments: --page"),
        (["--seed"], "expected one argument"),
    ],
)
def test_wrong_flags_are_value_errors_that_say_where_to_look(words, message):
    with pytest.raises(ValueError) as caught:
        engine_settings(*words)
    assert message in str(caught.value)
    assert "(see `rorqual test --help`)" in str(caught.value)


def test_the_sampling_table_covers_every_parameter():
    no_flags = {"seed", "logit_bias", "structured_outputs"}  # seed has a flag of its own; the others are no single words
    assert set(SAMPLING) | no_flags == {entry.name for entry in fields(SamplingParams)}


def test_sampling_flags():
    parser = Parser(prog="p")
    add_sampling(parser)
    assert sampling_params(parser.parse_args([])) == SamplingParams(**CLI_DEFAULTS)
    words = "--temperature 0.7 --top-p 0.9 --top-k 5 --min-p 0.1 --n 2 --stop a b --stop c --stop-token-ids 7 8 --min-tokens 2 --ignore-eos"
    words += " --presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.1 --logprobs 3 --prompt-logprobs 0 --max-tokens 9"
    words += " --no-skip-special-tokens --include-stop-str-in-output --sampling-seed 11"
    assert sampling_params(parser.parse_args(words.split())) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, n=2, stop=["a", "b", "c"], stop_token_ids=[7, 8], min_tokens=2, ignore_eos=True,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1, logprobs=3, prompt_logprobs=0, max_tokens=9,
        skip_special_tokens=False, include_stop_str_in_output=True, seed=11,
    )  # fmt: skip


def test_a_bad_sampling_value_names_the_field():
    parser = Parser(prog="p")
    add_sampling(parser)
    with pytest.raises(ValueError, match="temperature must be a number 0 or more, found -1.0"):
        sampling_params(parser.parse_args(["--temperature", "-1"]))


# ---- --config FILE


def parsed(tmp_path, values, *typed: str, name: str = "c.json"):
    file = tmp_path / name
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return cli.parse("generate", ["tiny", "--config", str(file), *typed])[1]


def test_a_config_file_gives_flags_and_the_command_line_wins(tmp_path):
    args = parsed(
        tmp_path,
        {
            "page_size": 16,
            "tp-size": 2,
            "temperature": -0.0,
            "disable_radix_cache": True,
            "stream": False,
            "prompt": ["a", "-b"],
            "seed": None,
        },
        "--page-size=4",
    )
    assert (args.page_size, args.tensor_parallel_size, args.enable_prefix_caching, args.stream) == (4, 2, False, False)
    assert args.prompt == ["a", "-b"]
    assert not hasattr(args, "seed")


def test_a_false_switch_in_a_config_file(tmp_path):
    args = parsed(tmp_path, {"enable_prefix_caching": False, "json": False, "disable_radix_cache": False})
    assert args.enable_prefix_caching is False and args.json is False


def test_yaml(tmp_path):
    pytest.importorskip("yaml")
    assert parsed(tmp_path, "page-size: 8\nignore-eos: true\n", name="c.yaml").page_size == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"page_sise": 1}, "'page_sise' is no setting of `rorqual generate`; did you mean 'page-size'?"),
        ({"config": "x"}, "'config' is no setting"),
        ({"json": "yes"}, "'json' must be true or false, found 'yes'"),
        ({"page_size": True}, "'page_size' must be a value, found True"),
        ({"page_size": [1, 2]}, "'page_size' takes one value, found a list of 2"),
        ({"page_size": "x"}, "invalid int value: 'x'"),
        ([1], "must hold a mapping of flags to values, found list"),
        ("{", "is not JSON"),
    ],
)
def test_bad_config_files(tmp_path, values, message):
    with pytest.raises(ValueError) as caught:
        parsed(tmp_path, values)
    assert message in str(caught.value)
