"""Which parsers a model needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from .reasoning import ReasoningFormat

#: reasoning formats by name (vLLM's names, where it has one)
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(always=True, strip=True),
    "deepseek_v3": ReasoningFormat(),
    "deepseek_v32": ReasoningFormat(),
    "glm45": ReasoningFormat(strip=True),
    "kimi_k2": ReasoningFormat(),
}
#: tool-call formats by name (vLLM's names, where it has one)
TOOL_FORMATS: tuple[str, ...] = ("deepseek_v3", "deepseek_v31", "deepseek_v32", "glm47", "kimi_k2")
#: other projects' names
_ALIASES = {
    ("--tool-call-parser", "deepseekv3"): "deepseek_v3",
    ("--tool-call-parser", "deepseekv31"): "deepseek_v31",
    ("--tool-call-parser", "deepseekv32"): "deepseek_v32",
    ("--tool-call-parser", "glm45"): "glm47",  # its line breaks are allowed for
    ("--tool-call-parser", "glm"): "glm47",
    ("--reasoning-parser", "deepseek_v31"): "deepseek_v3",
    ("--reasoning-parser", "deepseekv32"): "deepseek_v32",
    ("--reasoning-parser", "glm47"): "glm45",
}
#: what chat templates write for calls, by family
_MARKS = {
    "deepseek_v3": "<｜tool▁call▁begin｜>",
    "deepseek_v32": "｜DSML｜",
    "glm47": "<arg_key>",
    "kimi_k2": "<|tool_call_begin|>",
}
_FAMILIES = {"deepseek_v31": "deepseek_v3"}
#: what the flags may say beside a name
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, kw_only=True)
class ParserNames:
    """The parsers of a server; None for none."""

    reasoning: str | None = None
    tools: str | None = None
    hidden_reasoning: bool = False  # the reasoning's markers are special tokens: completions must be made with them
    hidden_tools: bool = True  # the same of the calls' markers


def choose_parsers(
    model_type: str,
    template: str | None = None,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    special_tokens: Collection[str] | None = None,
) -> ParserNames:
    """Parsers by the flags ``--reasoning-parser`` and ``--tool-call-parser``: a name, "none", or "auto" (also None).

    "auto" goes by ``model_type`` and, since DeepSeek's formats changed under one model type, by what the jinja chat template
    (None: it has none) writes. ``special_tokens`` are those which a completion is stripped of (``skip_special_tokens``).

    Raises:
        ValueError: an unknown name, or a tool-call parser for another format than the one in which the model is told to call.
    """
    auto = _by_model(model_type, template or "")
    names = ParserNames(
        reasoning=_pick("--reasoning-parser", reasoning or AUTO, auto.reasoning, tuple(REASONING_FORMATS)),
        tools=_pick("--tool-call-parser", tools or AUTO, auto.tools, TOOL_FORMATS),
    )
    written = {name for name, mark in _MARKS.items() if mark in (template or "")}
    if template is None and model_type == "deepseek_v32":
        written = {"deepseek_v32"}  # whose format is built in
    if names.tools is not None and written and _FAMILIES.get(names.tools, names.tools) not in written:
        fitting = ", ".join(name for name in TOOL_FORMATS if _FAMILIES.get(name, name) in written)
        raise ValueError(
            f"--tool-call-parser {names.tools} does not fit this model: its chat format shows calls in another form, for which "
            f"there is {fitting}; leave the flag out to have the parser chosen"
        )
    return names if special_tokens is None else _hidden(names, special_tokens)


def _hidden(names: ParserNames, special_tokens: Collection[str]) -> ParserNames:
    """``names`` with what the tokenizer would strip from a completion."""
    form = REASONING_FORMATS.get(names.reasoning or "")
    mark = _MARKS.get(_FAMILIES.get(names.tools or "", names.tools or ""), "")
    return replace(
        names,
        hidden_reasoning=form is not None and any(token in (form.begin, form.end) for token in special_tokens),
        hidden_tools=any(token and token in mark for token in special_tokens),
    )


def _pick(flag: str, wanted: str, auto: str | None, known: tuple[str, ...]) -> str | None:
    """The name that ``flag`` means."""
    if wanted == AUTO:
        return auto
    if wanted == NONE:
        return None
    wanted = _ALIASES.get((flag, wanted.replace("-", "_")), wanted.replace("-", "_"))
    if wanted not in known:
        raise ValueError(f"{flag} must be {AUTO}, {NONE} or one of {', '.join(known)}, found {wanted!r}")
    return wanted


def _by_model(model_type: str, template: str) -> ParserNames:
    """The parsers that fit a model."""
    if model_type in ("glm_moe_dsa", "glm4_moe"):
        return ParserNames(reasoning="glm45", tools="glm47")
    if model_type.startswith("kimi_k2") or "<|tool_calls_section_begin|>" in template:
        return ParserNames(reasoning="kimi_k2", tools="kimi_k2")
    if model_type == "deepseek_v32" and (not template or "DSML" in template):
        return ParserNames(reasoning="deepseek_v32", tools="deepseek_v32")
    if model_type in ("deepseek_v3", "deepseek_v32"):
        return _deepseek(template)
    return ParserNames()


def _deepseek(template: str) -> ParserNames:
    """DeepSeek V3, R1 and V3.1 (also V3.2-Exp) share a model type; their templates tell them apart."""
    if "thinking" in template:
        return ParserNames(reasoning="deepseek_v3", tools="deepseek_v31")
    if "<think>" in template:
        return ParserNames(reasoning="deepseek_r1", tools="deepseek_v3")
    return ParserNames(tools="deepseek_v3")
