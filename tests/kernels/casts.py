"""Right conversions of floats in Triton's interpreter: 3.6's do not carry a round-up into the exponent and cut off FP8 subnormals."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_original = interpreter._convert_float
_TORCH = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32}
_VIEWS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def _convert(input, input_dtype, output_dtype, rounding_mode):
    if input_dtype not in _TORCH or output_dtype not in _TORCH:
        return _original(input, input_dtype, output_dtype, rounding_mode)
    bits = np.frombuffer(input.tobytes(), _BITS[input_dtype.primitive_bitwidth]).copy()
    values = torch.from_numpy(bits).view(_TORCH[input_dtype]).float()
    if output_dtype == tl.float8e4nv:
        values = values.clamp(-448.0, 448.0)  # the hardware saturates
    out = values.to(_TORCH[output_dtype]).view(_VIEWS[output_dtype.primitive_bitwidth]).numpy()
    return out.view(_BITS[output_dtype.primitive_bitwidth]).reshape(input.shape)


def repair() -> None:
    """Call once before kernels run in the interpreter; harmless elsewhere and when repeated."""
    interpreter._convert_float = _convert
