"""How requests are spread over DP ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ...option import check_least, option

POLICIES = ("round_robin", "total_requests", "total_tokens", "kv")


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """Settings of ``Router``. ValueError names one that is out of range."""

    dp_routing: str = option(
        "total_tokens",
        "DP rank of a request: by turns, fewest open requests, fewest open tokens, or least work given what its prefix cache has (kv).",
        "--load-balance-method",
        choices=POLICIES,
        group="routing",
    )
    overlap_score_weight: float = option(
        4.0, "kv: weight of a page to prefill against a page being decoded.", "--kv-overlap-score-weight", group="routing"
    )
    router_balance_weight: float = option(
        0.25, "kv: weight of what a rank got of late beyond its share, in pages; more replicates popular prefixes sooner.", group="routing"
    )
    router_temperature: float = option(
        0.0, "kv: 0 takes the cheapest rank; more draws one at random, cheap ones more often.", group="routing"
    )
    router_max_blocks: int = option(
        4_000_000, "kv: most pages of all prefix caches that are remembered; more are ignored.", group="routing"
    )
    router_seed: int = option(0, "kv: seed of the draws.", group="routing")

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.dp_routing not in POLICIES:
            raise ValueError(f"dp_routing is one of {', '.join(POLICIES)}, found {self.dp_routing!r}")
        for name in ("overlap_score_weight", "router_balance_weight", "router_temperature"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0, found {value}")
        check_least(self, 1, "router_max_blocks")
