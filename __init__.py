"""rorqual: an inference stack for DeepSeek-style models (MLA, sparse attention, expert parallelism) under torchrun.

The public names are loaded on first use, so that ``import rorqual`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from .engine.config import EngineConfig
    from .engine.llm import LLM
    from .engine.outputs import RequestOutput
    from .engine.sampling_params import SamplingParams

_HOMES = {
    "LLM": ".engine.llm",
    "EngineConfig": ".engine.config",
    "RequestOutput": ".engine.outputs",
    "SamplingParams": ".engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home module on first use."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
