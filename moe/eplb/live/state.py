"""What belongs to an expert and so must move with it, declared once and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from .layout import Layout, Part, padded

#: remakes what is derived from the declared tensors of these local slots; called on the compute stream, after they changed
Derived = Callable[[list[int]], None]


class ExpertState:
    """The tensors of one layer's experts on one rank, each with a leading dimension of slots."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, n_slots: int, where: str, derived: Sequence[Derived] = ()) -> None:
        """
        Args:
            tensors: by name: weights, scales, biases, and what is derived from them if it is to travel.
            n_slots: of this rank.
            where: of errors, such as "layer 3".
            derived: remakes what is not among ``tensors``.

        Raises:
            ValueError: a tensor has no leading slot dimension, is not contiguous, or shares memory with another.
        """
        if not tensors:
            raise ValueError(f"{where}: no tensor is declared for its experts; name at least the weights")
        self.tensors = dict(sorted(tensors.items()))
        self.n_slots = n_slots
        self.where = where
        self.derived = tuple(derived)
        for name, tensor in self.tensors.items():
            self._check(name, tensor)
        self._check_apart()
        self.device = next(iter(self.tensors.values())).device
        self.layout = self._layout()

    @classmethod
    def of_module(
        cls, module: nn.Module, *, n_slots: int, where: str, shared: Sequence[str] = (), derived: Mapping[str, Derived] | None = None
    ) -> ExpertState:
        """Declare every tensor of ``module``: parameters, buffers and plain attributes, also inside of lists and dicts.

        Args:
            module: the experts of one layer.
            n_slots: of this rank.
            where: of errors.
            shared: names of tensors that are the same for all experts and stay.
            derived: names of tensors that are not moved but remade, with what remakes them.

        Raises:
            ValueError: as of the constructor; a tensor that does not lead with slots must be in ``shared`` or ``derived``.
        """
        remade = dict(derived or {})
        found = dict(_tensors_of(module))
        unknown = sorted({*shared, *remade} - set(found))
        if unknown:
            raise ValueError(f"{where}: no tensor is called {', '.join(unknown)}; there are {', '.join(found)}")
        moving = {name: tensor for name, tensor in found.items() if name not in remade and name not in shared}
        return cls(moving, n_slots=n_slots, where=where, derived=tuple(dict.fromkeys(remade.values())))

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        shape = list(tensor.shape)
        if tensor.ndim == 0 or tensor.shape[0] != self.n_slots:
            raise ValueError(
                f"{self.where}: {name} {shape} does not lead with the {self.n_slots} slots of this rank, so its part of an expert cannot "
                f"be moved; reorder it, or declare it as shared by all experts, or as derived with a function that remakes it"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.where}: {name} {shape} with strides {list(tensor.stride())} is not contiguous, so a slot of it is not one piece "
                f"of memory; make it contiguous when weights are loaded, or declare it as derived"
            )
        if tensor.numel() == 0:
            raise ValueError(f"{self.where}: {name} {shape} is empty; leave it out")

    def _check_apart(self) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in self.tensors.items())
        for (_, end, first), (begin, _, second) in zip(spans, spans[1:], strict=False):
            if begin < end:
                raise ValueError(f"{self.where}: {first} and {second} share memory; declare one of them only")
        devices = {tensor.device for tensor in self.tensors.values()}
        if len(devices) > 1:
            raise ValueError(f"{self.where}: tensors of experts are on several devices: {sorted(map(str, devices))}; put them on one")

    def _layout(self) -> Layout:
        parts, start = [], 0
        for name, tensor in self.tensors.items():
            n_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
            shape = tuple(tensor.shape[1:])
            parts.append(Part(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=shape, start=start, n_bytes=n_bytes))
            start = padded(start + n_bytes)
        return Layout(parts=tuple(parts))

    def views(self, slot: int) -> list[torch.Tensor]:
        """uint8 views of what slot ``slot`` holds, in the layout's order."""
        return [tensor[slot : slot + 1].view(-1).view(torch.uint8) for tensor in self.tensors.values()]

    def pack(self, slot: int, buffer: torch.Tensor) -> None:
        """Copy slot ``slot`` into the uint8 ``buffer``; bytes between tensors are left as they are."""
        for part, view in zip(self.layout.parts, self.views(slot), strict=True):
            buffer[part.start : part.start + part.n_bytes].copy_(view)

    def unpack(self, buffer: torch.Tensor, slot: int) -> None:
        """Copy a packed expert into slot ``slot``."""
        for part, view in zip(self.layout.parts, self.views(slot), strict=True):
            view.copy_(buffer[part.start : part.start + part.n_bytes])

    def fill(self, buffer: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Pack an expert that comes from elsewhere: one tensor a declared name, without the slot dimension.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has another shape or dtype.
        """
        if set(values) != set(self.tensors):
            raise ValueError(f"{self.where}: an expert has {', '.join(self.tensors)}; found {', '.join(sorted(values)) or 'nothing'}")
        for part in self.layout.parts:
            value = values[part.name]
            found = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
            if found != (part.dtype, part.shape):
                raise ValueError(f"{self.where}: {part.name} must be {part.dtype}{list(part.shape)}, found {found[0]}{list(found[1])}")
            flat = value.contiguous().view(-1).view(torch.uint8)
            buffer[part.start : part.start + part.n_bytes].copy_(flat)

    def clear(self, slot: int) -> None:
        """Zero slot ``slot``: it holds no expert."""
        for view in self.views(slot):
            view.zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy slot ``source`` to slot ``target``."""
        for from_view, to_view in zip(self.views(source), self.views(target), strict=True):
            to_view.copy_(from_view)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that ``module`` holds, by a dotted name, each once."""
    seen: set[int] = set()

    def walk(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value):
                yield from walk(f"{name}.{place}", item)

    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            yield from walk(dot + name, value)
        for name, value in vars(part).items():  # those of private names too: a derived tensor is hidden there most likely
            yield from walk(dot + name, value)


def agree_layouts(states: Sequence[ExpertState]) -> Layout:
    """The one layout of all layers. ValueError naming a layer that differs."""
    first = states[0]
    for state in states[1:]:
        if state.layout != first.layout:
            raise ValueError(
                f"experts of {state.where} ({state.layout.describe()}) are not made like those of {first.where} "
                f"({first.layout.describe()}); layers that exchange experts in one cycle must have the same"
            )
    return first.layout
