"""Where ranks meet: torchrun's environment and the key-value store it points at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_hosted: dict[tuple[str, int], TCPStore] = {}  # a store's server lives as long as the process that hosts it


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One job as this rank sees it."""

    rank: int  # global rank
    world_size: int  # ranks of the job
    local_world_size: int  # ranks on this node
    host: str  # host of the store
    port: int  # its port
    attempt: str  # torchrun's restart count: keys of a failed attempt must not be read again
    agent_hosts: bool  # whether torchrun's agent runs the store's server; else rank 0 does
    store: TCPStore  # a connection for the main thread

    @classmethod
    def from_env(cls, timeout_s: float) -> Rendezvous:
        """Read torchrun's variables and connect. Raises ValueError naming those that are missing."""
        missing = [name for name in _NAMES if name not in os.environ]
        if missing:
            names = ", ".join(missing)
            raise ValueError(f"several ranks need torchrun's environment; missing: {names}. Start with: torchrun --nproc-per-node N ...")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world_size=world_size,
            local_world_size=ranks_of_host(world_size),
            host=host,
            port=port,
            attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            agent_hosts=agent_hosts,
            store=_connect(host, port, timeout_s, serve=rank == 0 and not agent_hosts),
        )

    def under(self, prefix: str) -> Store:
        """The main thread's connection, with all keys below ``prefix``."""
        return PrefixStore(prefix, self.store)

    def connect(self, timeout_s: float) -> TCPStore:
        """One more connection, for another thread: a client blocks while it waits."""
        return _connect(self.host, self.port, timeout_s, serve=False)


def _connect(host: str, port: int, timeout_s: float, *, serve: bool) -> TCPStore:
    if serve and (host, port) in _hosted:
        return _hosted[host, port]
    try:
        store = TCPStore(host, port, None, serve, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        what = "rank 0 cannot open" if serve else "cannot reach"
        where = "MASTER_ADDR and MASTER_PORT must be node 0's, as this host reaches it"
        raise ValueError(f"{what} the store of this job at {host}:{port} ({str(error).splitlines()[0][:200]}); {where}") from None
    if serve:
        _hosted[host, port] = store
    return store


def ranks_of_host(world_size: int) -> int:
    """Ranks of this host: torchrun's LOCAL_WORLD_SIZE, all ``world_size`` of the job where it is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
