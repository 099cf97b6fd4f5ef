"""HTTPS, and a Unix socket, end to end."""

import shutil
import socket
import ssl
import subprocess

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the test's certificate, is not installed")
def test_https(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        cert,
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    with serving(FakeEngine(), wait=False, ssl_keyfile=str(key), ssl_certfile=str(cert)) as served:
        context = ssl.create_default_context(cafile=str(cert))
        served.engine.wait(lambda: served.process.state.texts is not None, "it is ready", 20)
        url = served.url.replace("http:", "https:")
        answer = httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}, verify=context, timeout=20)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:  # plain HTTP to an HTTPS port
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            try:
                assert b"200" not in sock.recv(100)
            except ConnectionResetError:
                pass
