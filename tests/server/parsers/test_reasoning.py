from __future__ import annotations

import subprocess
import sys

import pytest

from rorqual.engine.server.parsers import ParserNames, choose_parsers, make_parser
from tests.server.parsers.whole import parse_text

OPEN, CLOSED = "<｜Assistant｜><think>", "<｜Assistant｜></think>"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("deepseek_v32", OPEN, "a<b</think>c", "a<b", "c"),
        ("deepseek_v32", OPEN, "a\n</think>\n\nc ", "a\n", "\n\nc "),  # nothing of the text is changed
        ("deepseek_v32", CLOSED, "a</think>c", "", "a</think>c"),
        ("deepseek_v32", OPEN, "<think>a</think>c", "a", "c"),  # opened again by the model
        ("deepseek_v32", "", "c <think>", "", "c <think>"),
        ("deepseek_v32", "", "<think>a</think>c", "a", "c"),
        ("deepseek_v32", OPEN, "never ends</thin", "never ends</thin", ""),
        ("deepseek_v32", OPEN, "</think>", "", ""),
        ("deepseek_v32", OPEN, "", "", ""),
        ("deepseek_v3", CLOSED, "c", "", "c"),
        ("deepseek_v3", OPEN, "a</think>c", "a", "c"),
        ("deepseek_r1", OPEN + "\n", "\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
        ("deepseek_r1", "", "a</think>c", "a", "c"),  # it always reasons
        ("deepseek_r1", "", "\n <think>\na\n</think>\n\nc", "a", "c"),
        ("deepseek_r1", "", "<", "<", ""),
        ("glm45", "<|assistant|>", "\n<think>a</think>\nc", "a", "c"),
        ("glm45", "<|assistant|>\n<think></think>", "c", "", "c"),
        ("glm45", "<|assistant|>", "c", "", "c"),
        ("kimi_k2", "", "<think>a</think>c", "a", "c"),
        (None, OPEN, "a</think>c", "", "a</think>c"),
    ],
)
def test_reasoning_is_split(name: str | None, prompt: str, text: str, reasoning: str, content: str, split: bool) -> None:
    whole = parse_text(name, None, text, prompt=prompt, split=split)
    assert whole.parts() == (reasoning, content, [])


def test_text_is_not_held_back() -> None:
    parser = make_parser(ParserNames(reasoning="deepseek_v32"), prompt=OPEN)
    assert parser.in_reasoning
    assert parser.push("one").reasoning == "one"
    assert not parser.push("<")
    assert parser.push("x").reasoning == "<x"
    assert parser.push("</think>y").content == "y"
    assert not parser.in_reasoning
    assert parser.push("</think>").content == "</think>"


def test_endless_white_space_costs_little() -> None:
    parser = make_parser(ParserNames(reasoning="deepseek_r1"))
    parser.push("a")
    given = sum(len(parser.push("\n").reasoning) for _ in range(50_000))
    assert given >= 49_900


@pytest.mark.parametrize(
    ("model_type", "template", "expected"),
    [
        ("deepseek_v32", None, ("deepseek_v32", "deepseek_v32")),
        ("deepseek_v32", "{% if thinking %}<think>", ("deepseek_v3", "deepseek_v31")),  # V3.2-Exp
        ("deepseek_v3", "{{'<｜Assistant｜><think>\\n'}}", ("deepseek_r1", "deepseek_v3")),
        ("deepseek_v3", "{% if thinking %}<think>", ("deepseek_v3", "deepseek_v31")),
        ("deepseek_v3", None, (None, "deepseek_v3")),
        ("deepseek_v3", "<|tool_calls_section_begin|>", ("kimi_k2", "kimi_k2")),
        ("glm_moe_dsa", "x", ("glm45", "glm47")),
        ("kimi_k2", None, ("kimi_k2", "kimi_k2")),
        ("llama", None, (None, None)),
    ],
)
def test_parsers_are_chosen_by_the_model(model_type: str, template: str | None, expected: tuple[str | None, str | None]) -> None:
    names = choose_parsers(model_type, template)
    assert (names.reasoning, names.tools) == expected


def test_flags_come_first() -> None:
    assert choose_parsers("deepseek_v3", reasoning="none", tools="kimi_k2") == ParserNames(tools="kimi_k2")
    assert choose_parsers("x", reasoning="deepseek-r1", tools="deepseekv31") == ParserNames(reasoning="deepseek_r1", tools="deepseek_v31")
    assert choose_parsers("x", reasoning="glm47", tools="glm45") == ParserNames(reasoning="glm45", tools="glm47")
    assert choose_parsers("deepseek_v32", tools="none") == ParserNames(reasoning="deepseek_v32")
    with pytest.raises(ValueError, match=r"--reasoning-parser must be auto, none or one of .*deepseek_v32.*, found 'r2'"):
        choose_parsers("deepseek_v32", reasoning="r2")
    with pytest.raises(ValueError, match=r"--tool-call-parser must be .*found 'json'"):
        choose_parsers("deepseek_v32", tools="json")


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "fitting"),
    [
        ("deepseek_v32", None, "deepseek_v31", "deepseek_v32"),  # the format is built in
        ("deepseek_v3", "{{ '<｜tool▁call▁begin｜>' }}", "deepseek_v32", "deepseek_v3, deepseek_v31"),
        ("glm_moe_dsa", "{{ '<arg_key>' }}", "kimi_k2", "glm47"),
    ],
)
def test_a_parser_of_another_format_is_refused(model_type: str, template: str | None, tools: str, fitting: str) -> None:
    with pytest.raises(ValueError, match=f"--tool-call-parser {tools} does not fit this model.*there is {fitting};"):
        choose_parsers(model_type, template, tools=tools)
    assert choose_parsers(model_type, template, tools=fitting.split(",")[0]).tools == fitting.split(",")[0]


def test_special_tokens_are_asked_for_where_they_are_markers() -> None:
    tool = {"type": "function", "function": {"name": "f"}}

    def needs(special: list[str] | None, **more: object) -> bool:
        names = choose_parsers("deepseek_v32", special_tokens=special)
        return make_parser(names, **more).needs_special_tokens  # type: ignore[arg-type]

    assert not needs(None) and needs(None, tools=[tool])  # not known: as if the calls' were
    assert not needs(["<｜User｜>", ""], tools=[tool])
    assert needs(["｜DSML｜"], tools=[tool]) and not needs(["｜DSML｜"])
    assert needs(["</think>"]) and not needs(["</think>"], separate_reasoning=False)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, rorqual.engine.server.parsers, rorqual.engine.text.chat; sys.exit('torch' in sys.modules or 'xgrammar' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
