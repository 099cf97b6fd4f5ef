"""Linear layers whose weights may be block FP8, and products that are summed and returned in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .backends import kernels_or_twin, needing

BLOCK = 128  # edge of the weight blocks that share a scale
_BACKENDS = {"torch": "fp8_gemm_torch", "triton": "fp8_gemm", "deep_gemm": "deep_gemm"}

_chosen: dict[str, Any] = {}


def use_fp8_backend(name: str, device: torch.device) -> None:
    """Compute block-FP8 products of linears by "torch" (blockwise, plain), "triton" or "deep_gemm" in this process from now on.

    "auto" is Triton on CUDA and torch elsewhere.

    Raises:
        ValueError: unknown, its package is not installed, or it cannot run on ``device``.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name not in _BACKENDS:
        raise ValueError(f"fp8 backend must be one of auto, {', '.join(_BACKENDS)}, found {name!r}")
    check_fp8_device(name, device)
    with needing(f"fp8 backend {name!r}", ("triton", "deep_gemm"), "--fp8-gemm-backend dequantise"):
        _chosen["fp8"] = import_module(f".kernels.{_BACKENDS[name]}", __package__)


def check_fp8_device(name: str, device: torch.device) -> None:
    """Refuse a backend by kernels where there is no GPU.

    Raises:
        ValueError: naming backend and device.
    """
    if name in ("triton", "deep_gemm") and device.type != "cuda":
        raise ValueError(f"fp8 backend {name!r} needs a CUDA device, this rank runs on {device.type}; use auto, dequantise or torch")


def _fp8(device: torch.device) -> Any:
    """The module with ``fp8_gemm`` and ``fp8_linear``."""
    if "fp8" not in _chosen:
        use_fp8_backend("auto", device)
    return _chosen["fp8"]


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] by weight [N, K]: as it is, or e4m3 with fp32 ``scale`` [ceil(N/128), ceil(K/128)] -> [..., N] in x's dtype."""
    if scale is None:
        return F.linear(x, weight, bias)
    out: torch.Tensor = _fp8(x.device).fp8_linear(x, weight, scale, out_dtype=x.dtype, bias=bias)
    return out


def scale_shape(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., N, K]."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


class Fp8Linear(nn.Module):
    """``nn.Linear`` with a block-FP8 weight: x [..., in] -> [..., out] in x's dtype. Parameter names follow Hugging Face."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight = narrow_like(like.weight)
        self.weight_scale_inv = scales_like(like.weight)
        self.bias = like.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return product(x, self.weight, self.weight_scale_inv, self.bias)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``forward(silu(gate) * up)`` of ``gate_up`` [T, 2 * in]; only without a bias."""
        return gated_product(gate_up, self.weight, self.weight_scale_inv)


def narrow_like(weight: torch.Tensor) -> nn.Parameter:
    """An empty e4m3 parameter of the shape and device of ``weight``."""
    return nn.Parameter(torch.empty_like(weight, dtype=torch.float8_e4m3fn), requires_grad=False)


def scales_like(weight: torch.Tensor) -> nn.Parameter:
    """An empty fp32 parameter for the block scales of ``weight`` [..., N, K]."""
    return nn.Parameter(torch.empty(scale_shape(weight.shape), dtype=torch.float32, device=weight.device), requires_grad=False)


class WideWeight:
    """A float32 weight used in products that must not lose precision: the gate, the indexer's head weights.

    Published checkpoints store these in bf16. Where every value fits bf16 and the inputs are bf16, a bf16 product with
    fp32 sums has the same terms as the fp32 product and reads half of the bytes.
    """

    def __init__(self) -> None:
        self._narrow: torch.Tensor | None = None
        self._few: Any = None  # the module for few outputs

    def settle(self, weight: torch.Tensor) -> None:
        """Look at the loaded ``weight`` [N, K] once, and keep a bf16 copy if that loses nothing (CUDA only)."""
        narrow = weight.to(torch.bfloat16)
        self._narrow = narrow if weight.is_cuda and bool((narrow.float() == weight).all()) else None

    def fuse(self) -> None:
        """Compute few outputs by a kernel from now on, where there is a bf16 copy; called once weights are in place."""
        if self._narrow is not None:
            self._few = kernels_or_twin(".kernels.wide_product", __package__, cuda=True)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, K] by ``weight`` [N, K] fp32 -> [T, N] fp32."""
        if self._narrow is not None and x.dtype == torch.bfloat16:
            if self._few is not None and len(x) * len(weight) <= self._few.MOST_OUTPUTS:
                out: torch.Tensor = self._few.wide_product(x, self._narrow)
                return out
            return torch.mm(x, self._narrow.t(), out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())


class Stacked:
    """Linears with the same input as one product: their weights become views of one tensor, in the order given.

    FP8 parts must start at a multiple of 128 rows, so all but the last must have such a width. Not a module: the parts stay
    the owners of their parameters.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        weights = [_weight(part) for part in parts]
        widths = [len(weight) for weight in weights]
        self._weight = torch.cat([weight.data for weight in weights])
        scales = [_scale(part) for part in parts]
        self._scale: torch.Tensor | None = None
        for weight, piece in zip(weights, torch.split(self._weight, widths), strict=True):
            weight.data = piece
        if scales[0] is not None:
            self._scale = torch.cat([scale.data for scale in scales if scale is not None])
            heights = [len(scale) for scale in scales if scale is not None]
            for scale, piece in zip(scales, torch.split(self._scale, heights), strict=True):
                assert scale is not None
                scale.data = piece

    @staticmethod
    def fits(parts: Sequence[nn.Module]) -> bool:
        """Whether the parts can be stacked: no biases, one dtype, and blocks that do not straddle two parts."""
        weights, scales = [_weight(part) for part in parts], [_scale(part) for part in parts]
        plain = all(getattr(part, "bias", None) is None for part in parts)
        alike = len({weight.dtype for weight in weights}) == 1
        return plain and alike and (scales[0] is None or all(len(weight) % BLOCK == 0 for weight in weights[:-1]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, sum of N_i], the outputs of the parts side by side."""
        return product(x, self._weight, self._scale)


def stack(parts: Sequence[nn.Module]) -> Stacked | None:
    """The parts as one product, or None where they do not fit together."""
    return Stacked(parts) if len(parts) > 1 and Stacked.fits(parts) else None


def _weight(part: nn.Module) -> torch.Tensor:
    weight = part.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _scale(part: nn.Module) -> torch.Tensor | None:
    scale = getattr(part, "weight_scale_inv", None)
    assert scale is None or isinstance(scale, torch.Tensor)
    return scale


def gated_product(gate_up: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up`` [T, 2 * K] by weight [N, K] -> [T, N]; activation and quantisation are one pass."""
    kernels = import_module(".kernels.quantise" if gate_up.is_cuda else ".kernels.quantise_torch", __package__)
    if scale is None:
        return F.linear(kernels.silu_mul(gate_up), weight)
    values, scales = kernels.silu_mul_quantise(gate_up)
    out: torch.Tensor = _fp8(gate_up.device).fp8_gemm(values, scales, weight, scale, out_dtype=gate_up.dtype)
    return out
