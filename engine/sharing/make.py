"""The leader's part in the prefix directory, from its settings and pools."""

from __future__ import annotations

from ..config import EngineConfig
from ..offload.mover import Mover
from ..offload.pools import OffloadPools
from .prefix_share import PrefixShare


def make_share(config: EngineConfig, pools: OffloadPools | None, mover: Mover | None, *, debug: bool) -> PrefixShare | None:
    """What the leader of a replica has of the prefix directory; None without one."""
    if pools is None or mover is None or pools.membership is None:
        return None
    assert pools.membership.directory is not None, "the leader is the member"
    return PrefixShare(
        pools.membership.directory,
        copies_done=mover.copies_done,
        timeout_s=config.dist_timeout,
        poison=pools.host.poison if debug else None,
    )
