"""Slots of experts and what moving them takes, for a model that need not be there."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import EngineConfig
from ..engine.eplb.location import check_model, n_slots, sparse_layers
from ..engine.eplb.room import describe_balance, live_config
from ..engine.eplb_settings import check_eplb_settings, uses_placement
from ..engine.model_config import ModelConfig
from ..moe.eplb.live.layout import padded


@dataclass(frozen=True, kw_only=True)
class ExpertPlaces:
    """What the settings of balancing come to for one model and layout."""

    config: EngineConfig
    model: ModelConfig
    slots: int  # of a layer over all ranks; 0 without experts
    ranks: int  # that the experts are spread over

    @classmethod
    def of(
        cls, model: ModelConfig, *, tp: int, dp: int, pp: int, ep: int | None, num_redundant_experts: int | None, enable_eplb: bool
    ) -> ExpertPlaces:
        """From the flags.

        Raises:
            ValueError: they do not fit each other, the layout or the model.
        """
        config = EngineConfig(
            tensor_parallel_size=tp, data_parallel_size=dp, pipeline_parallel_size=pp, expert_parallel_size=ep,
            num_redundant_experts=num_redundant_experts, enable_eplb=enable_eplb,
        )  # fmt: skip
        check_eplb_settings(config)
        check_model(config, model)
        ranks = dp * tp if ep is None else ep
        return cls(config=config, model=model, slots=n_slots(config, model, ranks) if model.moe is not None else 0, ranks=ranks)

    @property
    def placed(self) -> bool:
        """Whether slots are rounded up to a multiple of the ranks."""
        return uses_placement(self.config)

    def scaled(self, n_bytes: int, ways: int) -> int:
        """Bytes of all routed experts of some layers -> those of a rank that holds one of ``ways`` parts of them."""
        assert self.model.moe is not None
        return n_bytes // self.model.moe.n_experts * self.slots // ways

    def staging(self, width: int) -> int:
        """Bytes of the buffers through which experts go, for values of ``width`` bytes."""
        if not self.config.enable_eplb or self.model.moe is None:
            return 0
        moe = self.model.moe
        parts = (2 * moe.intermediate * moe.hidden, moe.intermediate * moe.hidden)
        return live_config(self.config).memory_bytes(sum(padded(width * part) for part in parts))

    def text(self, layers: range, width: int) -> str:
        """The line for a rank of the stage with ``layers``; empty where there is nothing to say."""
        mine = [layer for layer in sparse_layers(self.model) if layer in layers]
        if not self.placed or not mine:
            return ""
        assert self.model.moe is not None
        moe = self.model.moe
        return describe_balance(
            self.config, layers=mine, slots_per_rank=self.slots // self.ranks, spare=self.slots - moe.n_experts,
            one=3 * moe.intermediate * moe.hidden * width, staging=self.staging(width),
        )  # fmt: skip
