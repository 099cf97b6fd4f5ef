"""Ranges of the profiler around the modules and operations of a model, put there for a trace and taken away after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.profiler import record_function

from ..parallel.linear import Stacked

#: makes a range of a name
Mark = Callable[[str], AbstractContextManager[object]]

#: ranges of modules, whose dense products belong to "linear" nevertheless
MODULE = "rorqual.module."
#: ranges of work that belongs to one part whatever kernels it is made of
PART = "rorqual.part."
#: last component of a module's name -> the part that its work belongs to
_MODULES = {"self_attn": "attention", "indexer": "indexer", "mlp": "MoE"}
#: operations of ``AttentionOps`` and ``MoEOps`` that belong to another part than the module which calls them
_OPS = {
    "write_index": "indexer",
    "index_query": "indexer",
    "indexer_logits": "indexer",
    "select_rows": "top-k",
    "route": "MoE",
    "fused_experts": "MoE",
    "expert_rows": "MoE",
    "grouped_swiglu": "MoE",
}


def part(name: str) -> record_function:
    """A range for work of the part ``name``."""
    return record_function(PART + name)


@contextmanager
def ranges(model: nn.Module, mark: Mark = record_function) -> Iterator[None]:
    """Ranges around everything in ``model`` that is known to belong to a part; the innermost one counts. ``mark`` makes one."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            last = name.rsplit(".", 1)[-1]
            if "Linear" in type(module).__name__:
                _hook(module, PART + "linear", mark, stack)
            elif last in _MODULES:
                _hook(module, MODULE + _MODULES[last], mark, stack)
            for field, value in list(vars(module).items()):
                if isinstance(value, Stacked):
                    _swap(module, field, _Marked(value, "linear", mark), stack)
            for holder in (module, getattr(module, "exchange", None)):
                _mark_ops(holder, mark, stack)
        yield


def _hook(module: nn.Module, name: str, mark: Mark, stack: ExitStack) -> None:
    """Put a range around the module's forward until ``stack`` closes."""
    opened: list[ExitStack] = []

    def enter(*_: Any) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(mark(name))

    def leave(*_: Any) -> None:
        opened.pop().close()

    for hook in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
        stack.callback(hook.remove)


def _swap(holder: Any, field: str, value: Any, stack: ExitStack) -> None:
    """Set an attribute until ``stack`` closes."""
    stack.callback(setattr, holder, field, getattr(holder, field))
    setattr(holder, field, value)


def _mark_ops(holder: Any, mark: Mark, stack: ExitStack) -> None:
    """Mark the operations of ``holder.ops``, if it has some."""
    ops: Any = getattr(holder, "ops", None)
    if not dataclasses.is_dataclass(ops) or isinstance(ops, type):
        return
    named = {f.name: _OPS[f.name] for f in dataclasses.fields(ops) if f.name in _OPS}
    marked = {field: _Marked(getattr(ops, field), name, mark) for field, name in named.items()}
    _swap(holder, "ops", dataclasses.replace(ops, **marked), stack)


class _Marked:
    """Stands for something that is called, itself or by its methods, and puts a range around every call."""

    def __init__(self, inner: Any, name: str, mark: Mark) -> None:
        self._inner, self._name, self._mark = inner, name, mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._mark(PART + self._name):
            return self._inner(*args, **kwargs)

    def __getattr__(self, field: str) -> Any:
        value = getattr(self._inner, field)
        return _Marked(value, self._name, self._mark) if callable(value) else value
