"""Records the load of a running engine, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from ....parallel.group import Group
from ...load import ExpertLoad
from ..topology import Ints
from ..trace import PHASES, LoadTrace
from .gathered import gather_steps
from .step_buffer import StepBuffer
from .window import LoadWindow

#: SGLang's names. stat: counts of each step. stat_approx: the same here, where exact counts cost no more. per_pass: as stat, written as
#: one record for each step. per_token: also the experts of every token.
RecorderMode = Literal["stat", "stat_approx", "per_pass", "per_token"]


#: steps whose tokens stay on the device before they go to the host: by then it has computed them
_ON_DEVICE = 8


@dataclass(frozen=True, kw_only=True)
class StepNote:
    """What is known of a step besides its counts."""

    step: int  # number of the step
    tokens: int  # tokens that this rank answers for, padding excluded
    phase: int  # index into PHASES
    domain: str = ""  # workload, where the caller says so


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """Experts of the tokens of one step that this rank routed."""

    step: int  # number of the step
    ids: torch.Tensor  # [layers, tokens, top_k] int16 logical experts
    token_ids: torch.Tensor | None = None  # [tokens] of the vocabulary, where the caller gives them
    positions: torch.Tensor | None = None  # [tokens] in their sequences, where the caller gives them


class LoadRecorder:
    """Windows of load for live balancing and, with a ``mode``, a trace for tools.

    Args:
        load: counts of this rank; row i is the model's layer i. They stay cumulative.
        layer_ids: the model's numbers of the MoE layers that this rank runs.
        top_k: choices of a token.
        window: steps of ``window``.
        mode: what is recorded; None: only the window.
        buffer: steps that are kept, the newest; None: all.

    Raises:
        ValueError: no layer to record, an unknown mode, or counting that is switched off.
    """

    def __init__(
        self,
        load: ExpertLoad,
        *,
        layer_ids: Sequence[int],
        top_k: int,
        window: int = 1000,
        mode: RecorderMode | None = None,
        buffer: int | None = 1000,
    ) -> None:
        rows = len(load.counts)
        if not layer_ids:
            raise ValueError("expert load: this rank has no MoE layer, so there is nothing to record or to balance; leave recording off")
        if not all(0 <= layer < rows for layer in layer_ids):
            raise ValueError(f"expert load: counts have layers 0 to {rows - 1}, found layer ids {list(layer_ids)}")
        if mode is not None and mode not in get_args(RecorderMode):
            raise ValueError(f"expert distribution recorder: mode must be one of {', '.join(get_args(RecorderMode))}, found {mode!r}")
        if not load.enabled:
            raise ValueError("expert load: counting is switched off; switch enable_expert_load on to record or balance experts")
        self.load, self.layer_ids, self.top_k, self.mode = load, tuple(layer_ids), top_k, mode
        self._window = LoadWindow(load.counts, self.layer_ids, window)
        self._buffer = None if mode is None else StepBuffer(load.counts, self.layer_ids, buffer)
        self._notes: deque[StepNote] = deque(maxlen=buffer)
        self._tokens: deque[TokenRecord] = deque(maxlen=buffer)
        if mode == "per_token":
            load.kept = [[] for _ in range(rows)]

    @property
    def n_layers(self) -> int:
        """MoE layers that are recorded."""
        return len(self.layer_ids)

    def describe(self) -> str:
        """One line for a log: what is recorded, and on how many layers."""
        what = "a window only" if self.mode is None else f"mode {self.mode}"
        first, last = self.layer_ids[0], self.layer_ids[-1]
        return (
            f"expert load is recorded on {self.n_layers} MoE layers ({first} to {last}) of {self.load.counts.shape[1]} experts: "
            f"window of {self._window.length} steps, {what}"
        )

    def after_step(
        self,
        step: int,
        *,
        tokens: int,
        phase: str = "mixed",
        domain: str = "",
        token_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Step ``step`` has been launched; called on its stream, once a step, on all ranks of the EP group alike.

        Does not wait for the device, except in mode ``per_token``: for a step eight steps ago, whose tokens go to the host.

        Args:
            step: its number.
            tokens: of this rank's replica, padding excluded, on the first of its tp ranks; 0 on the others.
            phase: "prefill", "decode" or "mixed" (both kinds of rows).
            domain: name of the workload.
            token_ids: [T] of the tokens that this rank routed, for ``per_token``.
            positions: [T] of the same.
        """
        self._window.push()
        if self._buffer is None:
            return
        self._buffer.push()
        self._notes.append(StepNote(step=step, tokens=tokens, phase=PHASES.index(phase), domain=domain))
        if self.mode == "per_token":
            kept = self.load.take_kept()
            ids = torch.stack([kept[layer] for layer in self.layer_ids])
            self._tokens.append(TokenRecord(step=step, ids=ids, token_ids=token_ids, positions=positions))
            if len(self._tokens) > _ON_DEVICE:
                self._tokens[-1 - _ON_DEVICE] = _real(self._tokens[-1 - _ON_DEVICE])

    def window(self) -> torch.Tensor:
        """[layers, experts] int64 choices of the last steps on this rank, where they are counted. Does not wait for the device."""
        return self._window.sum()

    @property
    def window_steps(self) -> int:
        """Steps that ``window`` covers: its length, up to a part in 16 more, or all steps if there were fewer."""
        return self._window.covered

    def clear(self) -> None:
        """Forget the recorded steps."""
        self._notes.clear()
        self._tokens.clear()
        if self._buffer is not None:
            self._buffer.clear()

    def trace(self, group: Group | None = None, *, meta: dict[str, str] | None = None) -> LoadTrace:
        """The recorded steps, summed over the ranks of the EP group. Collective; waits for the device.

        Raises:
            ValueError: nothing was recorded, or not the same steps on all ranks.
        """
        if self._buffer is None or not self._notes:
            raise ValueError("expert distribution recorder: no step was recorded; set a recorder mode before the steps that matter")
        counts, tokens, phase = gather_steps(group or Group.solo(), self._buffer.counts(), self.notes)
        return LoadTrace(
            counts=counts,
            layer_ids=self.layer_ids,
            top_k=self.top_k,
            tokens=tokens,
            phase=phase,
            domain=tuple(note.domain for note in self._notes) if any(note.domain for note in self._notes) else None,
            n_ranks=1 if group is None else group.size,
            meta={"recorder_mode": str(self.mode), "first_step": str(self._notes[0].step)} | (meta or {}),
        )

    @property
    def notes(self) -> tuple[StepNote, ...]:
        """What is known of the recorded steps, oldest first."""
        return tuple(self._notes)

    def token_records(self) -> list[TokenRecord]:
        """Of mode ``per_token``: this rank's tokens, on the host, oldest first, without padding. Waits for the device."""
        return [_real(record) for record in self._tokens]

    def local_counts(self) -> Ints:
        """[steps, layers, experts] of this rank alone. Waits for the device."""
        return np.zeros((0, self.n_layers, self.load.counts.shape[1]), np.int64) if self._buffer is None else self._buffer.counts()


def _real(record: TokenRecord) -> TokenRecord:
    """The record on the host, without the rows that are padding (id -1 in every layer)."""
    ids = record.ids.cpu()
    real = ids[0, :, 0] >= 0 if ids.numel() else torch.ones(ids.shape[1], dtype=torch.bool)

    def kept(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.cpu()[: len(real)][real[: len(x)]]

    return TokenRecord(step=record.step, ids=ids[:, real], token_ids=kept(record.token_ids), positions=kept(record.positions))
