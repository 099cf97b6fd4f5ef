"""Which address and interface a host uses towards another."""

from __future__ import annotations

import pytest

from rorqual.parallel.interface import address_towards, choose_gloo_interface, host_label, interface_towards, interfaces, named_interface


def test_loopback_is_known() -> None:
    assert ("lo", "127.0.0.1") in interfaces()
    assert address_towards("127.0.0.1", 9) == "127.0.0.1" and interface_towards("127.0.0.1", 9) == "lo"
    assert "(" not in host_label("127.0.0.1", 9)
    assert address_towards("no-such-name.invalid", 9) is None and interface_towards("no-such-name.invalid", 9) is None


def test_gloo_gets_loopback_on_one_host_and_keeps_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert choose_gloo_interface("10.1.2.3", 9, single_host=False) == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=eth99 names no interface"):
        choose_gloo_interface("127.0.0.1", 9, single_host=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99,lo")
    assert choose_gloo_interface("127.0.0.1", 9, single_host=True) == "eth99,lo" and named_interface() == ("lo", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert named_interface() is None
    assert choose_gloo_interface("192.0.2.1", 9, single_host=True) == "lo"
