"""The nodes of a job meet before any rank starts: who is missing, or was started otherwise, is named at once.

Node 0 opens the job's store on the address it was given and on no other; the rest connect to it. torchrun's agents then
use the same store (they find the server of this process by its port).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ... import __version__
from ...parallel.interface import host_label, interfaces
from ...parallel.ports import listen
from ...parallel.roll_call import AbsentError, Record, call_roll
from .settings import NodeSettings

log = logging.getLogger("rorqual")
_NAME_S = 30.0  # how long a name may take to become known
_TELL_EVERY_S = 10.0  # a line that says who is awaited


def open_store(nodes: NodeSettings) -> TCPStore:
    """The job's store: served here on node 0, reached from here on the others.

    Raises:
        ValueError: the address or port cannot be used or reached; the message says why.
    """
    host, port = nodes.endpoint
    timeout = timedelta(seconds=nodes.node_timeout)
    if nodes.node_rank == 0:
        address = _resolve(host, min(nodes.node_timeout, _NAME_S))
        if nodes.nnodes > 1 and address.startswith("127.") and host not in (address, "localhost"):
            own = ", ".join(f"{ip} ({name})" for name, ip in interfaces() if not ip.startswith("127."))
            raise ValueError(
                f"--master-addr {host} is {address} on this host, which no other reaches; give its address, one of {own or 'none'}"
            )
        listener = listen(address, port, "node 0's store, where the ranks meet,")
        port = listener.getsockname()[1]
        return TCPStore(host, port, None, True, timeout, False, True, listener.detach(), True)
    _knock(host, port, nodes.node_timeout)
    try:
        return TCPStore(host, port, None, False, timedelta(seconds=min(nodes.node_timeout, 30.0)), False, True)
    except RuntimeError as error:
        what = f"something answers at {host}:{port}, but it is not node 0 of a job ({str(error).splitlines()[0][:150]})"
        raise ValueError(f"{what}; check --master-addr and --master-port") from None


def _resolve(host: str, timeout_s: float) -> str:
    """The address of a name, IPv4 if there is one; names of pods are known some seconds after these have started."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() >= end:
                raise ValueError(f"--master-addr {host!r} is no address and no name that this host knows ({error})") from None
        time.sleep(0.5)


def _knock(host: str, port: int, timeout_s: float) -> None:
    """Wait until node 0 takes connections. Raises ValueError when the name is unknown, or at the deadline with the reason."""
    address = _resolve(host, min(timeout_s, _NAME_S))
    begin, told, why = time.monotonic(), time.monotonic(), ""
    while True:
        left = begin + timeout_s - time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=max(min(left, 5.0), 0.1)):
                return
        except OSError as error:
            why = _why(error)
        if time.monotonic() - begin >= timeout_s:
            raise ValueError(f"node 0 does not answer at {host}:{port} within {timeout_s:g} s: {why}")
        if time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            log.info("waiting for node 0 at %s:%d: %s", host, port, why)
        time.sleep(min(0.3, max(left, 0.05)))


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer at all (wrong --master-addr, a firewall, or the host is down)"
    if error.errno == errno.ECONNREFUSED:
        return "the host is there, but nothing listens at that port (is node 0 running, with the same --master-port?)"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"{error.strerror} (wrong --master-addr, or the network between the hosts is down)"
    return error.strerror or str(error)


def meet(store: TCPStore, nodes: NodeSettings, nproc: int) -> list[str]:
    """Wait for all nodes and compare how they were started -> the hosts' labels. Collective over the nodes.

    Raises:
        ValueError: one is missing at the deadline, is there twice, or was started otherwise.
    """
    host, port = nodes.endpoint
    label = host_label(host, port)
    names = PrefixStore("rorqual/nodes", store)
    ours = json.dumps([f"{label}, process {os.getpid()}", uuid.uuid4().hex])
    holder = names.compare_set(f"holder/{nodes.node_rank}", "", ours).decode()
    if holder != ours:
        raise ValueError(f"node {nodes.node_rank} is there already ({json.loads(holder)[0]}); give each node its own --node-rank")
    record: Record = {"host": label, "nnodes": nodes.nnodes, "nproc": nproc, "rorqual": __version__, "torch": torch.__version__}
    told = [time.monotonic()]

    def waiting(missing: Sequence[int]) -> None:
        if time.monotonic() - told[0] >= _TELL_EVERY_S:
            told[0] = time.monotonic()
            log.info("waiting for %s", f"node(s) {', '.join(map(str, missing))} of {nodes.nnodes}" if missing else "the other nodes")

    try:
        hosts: list[str] = call_roll(
            PrefixStore("roll", names), nodes.node_rank, nodes.nnodes, record, _judge, nodes.node_timeout, waiting=waiting
        )
        return hosts
    except AbsentError as error:
        missing = ", ".join(map(str, error.missing))
        raise ValueError(
            f"node(s) {missing} of {nodes.nnodes} did not come to {host}:{port} within {nodes.node_timeout:g} s; start them with the same "
            f"--master-addr, --master-port and --nnodes, and --node-rank {missing}"
        ) from None


def _judge(records: Sequence[Record]) -> list[str]:
    """Hosts of all nodes; ValueError naming the first that differs from node 0."""
    for name, flag in (("rorqual", ""), ("torch", ""), ("nnodes", "--"), ("nproc", "--")):
        for number, record in enumerate(records):
            if record[name] != records[0][name]:
                what = f"{flag}{name}"
                raise ValueError(
                    f"the nodes were not started alike: {what} is {records[0][name]} on node 0 ({records[0]['host']}) and "
                    f"{record[name]} on node {number} ({record['host']})"
                )
    return [str(record["host"]) for record in records]
