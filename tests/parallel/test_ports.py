"""A socket that listens from the first moment, and names for what stands in its way."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rorqual.parallel.ports import _command, listen, port_holder


def test_listens_where_it_is_told_and_nowhere_else() -> None:
    with listen("127.0.0.1", 0, "x") as sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1" and port > 0 and sock.get_inheritable()
        with socket.create_connection((host, port), timeout=5):
            pass
        assert port_holder(port).startswith(f"process {os.getpid()} (")  # type: ignore[union-attr]
    assert port_holder(port) is None


def test_a_port_in_use_names_its_holder() -> None:
    with listen("127.0.0.1", 0, "first") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ValueError) as caught:
            listen("127.0.0.1", port, "the second")
        assert f"the second cannot listen on 127.0.0.1:{port}: the port is in use by process {os.getpid()} (" in str(caught.value)


def test_addresses_that_cannot_be_used() -> None:
    with pytest.raises(ValueError, match=r"192.0.2.77:0: this host has no such address; it has .*127.0.0.1 \(lo\)"):
        listen("192.0.2.77", 0, "x")
    with pytest.raises(ValueError, match="is no address and no name"):
        listen("no-such-name.invalid", 0, "x")


@pytest.mark.parametrize("words", [["--api-key", "hidden", "hidden2", "--port", "1"], ["--api-key=hidden"], ["--api-k", "hidden"]])
def test_the_key_of_a_server_that_holds_the_port_is_not_told(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "cmdline").write_bytes("\0".join(["python3", "-m", "rorqual.launch", "serve", "M", *words, ""]).encode())
    assert _command(tmp_path) == "python3 -m rorqual.launch serve M --api-key ..."
