"""Triton 3.6's interpreter beside numpy 2.4: sizes that are tensors of one element must still serve as bounds of loops."""

from __future__ import annotations

from triton.runtime import interpreter

_original = interpreter._patch_lang_tensor


def _patched(tensor, scope):
    _original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def repair() -> None:
    """Call once before kernels run in the interpreter; harmless elsewhere and when repeated."""
    interpreter._patch_lang_tensor = _patched
