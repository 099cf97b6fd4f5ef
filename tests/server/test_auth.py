"""The API key."""

import httpx
import pytest

from rorqual.engine.server.config import ServerConfig, check_server_config, with_environment
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving


@pytest.fixture(scope="module")
def locked():
    with serving(FakeEngine(), api_key=("secret", "spare")) as served:
        with httpx.Client(base_url=served.url, timeout=20) as client:
            yield served, client


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer wrong", "Bearer secre", "Bearer secret2", "Basic secret", "secret"])
@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/dashboard.json", "/expert_load", "/openapi.json"])
def test_without_a_right_key(locked, path, value):
    served, client = locked
    answer = client.get(path, headers={} if value is None else {"Authorization": value})
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer" and "secret" not in answer.text


def test_the_body_of_a_stranger_is_not_read(locked):
    served, client = locked
    assert client.post("/v1/completions", json={"prompt": "x" * 100_000}).status_code == 401
    assert not served.engine.submits


def test_with_a_right_key(locked):
    served, client = locked
    for key in ("secret", "spare"):
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version", "/health_generate"])
def test_what_needs_no_key(locked, path):
    assert locked[1].get(path).status_code == 200


def test_keys_from_the_environment():
    assert with_environment(ServerConfig(), {"RORQUAL_API_KEY": "a", "VLLM_API_KEY": "b"}).api_key == ("a",)
    assert with_environment(ServerConfig(), {"VLLM_API_KEY": "b"}).api_key == ("b",)
    assert with_environment(ServerConfig(api_key=("c",)), {"RORQUAL_API_KEY": "a"}).api_key == ("c",)
    assert with_environment(ServerConfig(), {"RORQUAL_API_KEY": ""}).api_key is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70000}, "--port"),
        ({"api_server_count": 0}, "--api-server-count"),
        ({"body_timeout": 0.0}, "--body-timeout"),
        ({"header_timeout": float("nan")}, "--header-timeout"),
        ({"ssl_keyfile": "x"}, "--ssl-certfile"),
        ({"api_key": ("",)}, "--api-key"),
        ({"served_model_name": ("",)}, "--served-model-name"),
    ],
)
def test_settings_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        check_server_config(ServerConfig(**settings))
