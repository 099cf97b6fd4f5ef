"""A format of tool calls that lacks a part of the contract cannot be made."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rorqual.engine.server.parsers.tools.dsml import DsmlParser
from rorqual.engine.server.parsers.tools.glm import GlmParser
from rorqual.engine.server.parsers.tools.machine import Machine
from rorqual.engine.server.parsers.tools.sections import DeepseekV3Parser, KimiK2Parser, SectionParser
from rorqual.engine.server.parsers.tools.tagged import TaggedMachine


@pytest.mark.parametrize(
    ("base", "lacks"), [(Machine, {"_content", "_end"}), (SectionParser, {"_header"}), (TaggedMachine, {"_content", "_value"})]
)
def test_what_a_format_must_give_is_asked_of_it(base: Any, lacks: set[str]) -> None:
    assert inspect.isabstract(base) and base.__abstractmethods__ == lacks
    with pytest.raises(TypeError, match="abstract"):
        base(None)


@pytest.mark.parametrize("parser", [DsmlParser, GlmParser, DeepseekV3Parser, KimiK2Parser])
def test_every_format_gives_it(parser: Any) -> None:
    assert not inspect.isabstract(parser)
    assert "calls" in inspect.signature(parser).parameters and issubclass(parser, Machine)
