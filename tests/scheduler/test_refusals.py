"""Requests and settings that are refused, with the numbers."""

import re

import pytest

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.harness import make_config, make_request


def refuse(message, request, **config):
    with pytest.raises(ValueError, match=re.escape(message)):
        Scheduler(make_config(**config)).add(request)


def test_empty_prompt():
    refuse("request a: the prompt is empty; give at least one token", make_request("a", 0, []))


def test_prompt_too_long():
    refuse(
        "request a: the prompt has 20 tokens, but max_model_len 20 leaves room for 19 and one token of output",
        make_request("a", 0, range(1, 21)),
        max_model_len=20,
    )
    Scheduler(make_config(max_model_len=20)).add(make_request("a", 0, range(1, 20)))


def test_more_than_the_pool_holds():
    message = "request a: 10 prompt tokens and 7 of output need 5 pages of 4 tokens, but the KV pool has 4; lower max_tokens"
    refuse(message, make_request("a", 0, range(1, 11), max_tokens=7), n_pages=4)
    Scheduler(make_config(n_pages=4)).add(make_request("a", 0, range(1, 11), max_tokens=6))


def test_what_the_pool_must_hold_is_capped_by_max_model_len():
    Scheduler(make_config(n_pages=4, max_model_len=16)).add(make_request("a", 0, range(1, 11), max_tokens=1000))


def test_duplicate_id():
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", 0, [1]))
    with pytest.raises(ValueError, match="request a: a request with this id has not ended yet; ids must be unique"):
        scheduler.add(make_request("a", 1, [2]))


def test_validate_adds_nothing():
    scheduler = Scheduler(make_config())
    scheduler.validate(make_request("a", 0, [1]))
    with pytest.raises(ValueError, match="empty"):
        scheduler.validate(make_request("a", 0, []))
    assert not scheduler.has_work and scheduler.n_waiting == 0


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("page_size", 1),
        ("n_pages", 1),
        ("max_model_len", 2),
        ("pp", 1),
        ("admission_horizon", 0),
    ],
)
def test_settings(name, least):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, found {least - 1}"):
        make_config(**{name: least - 1})
    with pytest.raises(TypeError):
        SchedulerConfig(1, 1, 1, 1, 2)
