"""Settings of the HTTP processes. The flags of ``rorqual serve`` are generated from these fields. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..option import check_least, check_seconds, option
from .http_settings import HttpSettings

#: names of environment variables that may hold the API key, ours first
KEY_VARIABLES = ("RORQUAL_API_KEY", "VLLM_API_KEY")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpSettings):
    """Where the HTTP processes listen, whom they let in, and how much they take."""

    uds: str | None = option(None, "Path of a Unix socket to listen on, instead of host and port.", group="server")
    api_server_count: int = option(1, "HTTP processes that share the port.", "-asc", group="server")
    api_key: tuple[str, ...] | None = option(
        None, "Keys of which a client must send one; RORQUAL_API_KEY in the environment keeps it out of `ps`.", group="server"
    )
    served_model_name: tuple[str, ...] | None = option(
        None, "Names that requests may use for the model, the first in answers; MODEL by default.", group="server"
    )
    ssl_keyfile: str | None = option(None, "Private key file for HTTPS.", group="server")
    ssl_certfile: str | None = option(None, "Certificate file for HTTPS.", group="server")
    allowed_origins: tuple[str, ...] | None = option(
        None, "Web origins whose pages may use the server ('*' for all); none by default.", group="server"
    )

    max_completions: int = option(1024, "Most completions of one request: prompts times n.", group="server limits")
    keep_alive_timeout: float = option(30.0, "Seconds for which a connection without a request is kept.", group="server limits")
    send_timeout: float = option(
        120.0, "Seconds after which a client that reads none of its answer is dropped and its request aborted.", group="server limits"
    )
    request_timeout: float | None = option(None, "Seconds after which a request is aborted; no limit by default.", group="server limits")
    health_timeout: float = option(30.0, "Seconds in which /health_generate must see a token.", group="server limits")
    control_timeout: float = option(60.0, "Seconds in which the engine must answer /flush_cache and the like.", group="server limits")

    chat_template: str | None = option(None, "File of a jinja chat template, instead of the model's own.", group="server text")
    reasoning_parser: str = option(
        "auto", "How reasoning is told from the answer: 'auto' goes by the model, 'none' leaves it in.", group="server text"
    )
    tool_call_parser: str = option(
        "auto", "How tool calls are read from the answer: 'auto' goes by the model, 'none' leaves them in.", group="server text"
    )
    generation_config: str = option(
        "auto",
        "Default sampling: that of the model's generation_config.json (auto), or temperature 1 and nothing else (none).",
        choices=("auto", "none"),
        group="server text",
    )
    enable_auto_tool_choice: bool = option(
        True, "Read tool calls when a request with tools leaves the choice to the model.", group="server text"
    )
    return_tokens_as_token_ids: bool = option(False, "Write tokens in log-probabilities as 'token_id:N'.", group="server text")

    structured_compile_timeout: float = option(
        10.0, "Seconds in which a grammar of structured output must be compiled.", group="server text"
    )


def check_server_config(config: ServerConfig) -> ServerConfig:
    """``config`` itself.

    Raises:
        ValueError: a value out of range; names the flag and the fix.
    """
    config.check_http()
    check_least(config, 1, "api_server_count", "max_completions")
    check_seconds(
        config, "keep_alive_timeout", "send_timeout", "request_timeout", "health_timeout", "control_timeout", "structured_compile_timeout"
    )
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise ValueError("HTTPS needs both --ssl-keyfile and --ssl-certfile; found one of them")
    if any(not key for key in config.api_key or ()):
        raise ValueError("--api-key is empty; give a key, or leave the flag out for a server without keys")
    if any(not name for name in config.served_model_name or ()):
        raise ValueError("--served-model-name is empty; give a name, or leave the flag out")
    return config


def with_environment(config: ServerConfig, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """``config`` with the API key of the environment where no flag gave one."""
    environment = os.environ if environment is None else environment
    keys = [environment[name] for name in KEY_VARIABLES if environment.get(name)]
    return replace(config, api_key=(keys[0],)) if keys and not config.api_key else config
