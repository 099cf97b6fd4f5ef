from __future__ import annotations

import json

import pytest

from rorqual.engine.sampling_params import SamplingParams

BAD = [
    ("n", 0, "n must be an integer of 1 or more, found 0"),
    ("n", 1.0, "n must be an integer of 1 or more, found 1.0"),
    ("temperature", -0.1, "temperature must be a number 0 or more, found -0.1"),
    ("temperature", float("nan"), "temperature must be a number 0 or more, found nan"),
    ("temperature", "hot", "temperature must be a number 0 or more, found 'hot'"),
    ("top_p", 0.0, "top_p must be a number above 0 and at most 1, found 0.0"),
    ("top_p", 1.01, "top_p must be a number above 0 and at most 1, found 1.01"),
    ("top_k", -2, "top_k must be an integer from -1 to 2147483647 (0 or -1 keeps every token), found -2"),
    ("top_k", True, "top_k must be an integer"),
    ("min_p", 1.5, "min_p must be a number from 0 to 1, found 1.5"),
    ("seed", -1, "seed must be an integer from 0 to 9223372036854775807, or None, found -1"),
    ("seed", 2**63, "seed must be an integer from 0 to"),
    ("stop", "", "stop must be a non-empty string, a list of them, or None, found ('',)"),
    ("stop", ["a", 3], "stop must be a non-empty string, a list of them, or None, found ['a', 3]"),
    ("stop_token_ids", [1, -5], "stop_token_ids must be a list of token ids, each an integer of 0 or more, or None, found [1, -5]"),
    ("stop_token_ids", "12", "stop_token_ids must be a list of token ids"),
    ("max_tokens", 0, "max_tokens must be an integer of 1 or more, found 0"),
    ("max_tokens", 2**63, "max_tokens must be at most 9223372036854775807, found 9223372036854775808"),
    ("temperature", 10**400, "temperature must be a number 0 or more, found 1"),
    ("logit_bias", {5: -(10**400)}, "logit_bias of token 5 must be a number from -100 to 100, found -1"),
    ("max_tokens", None, "max_tokens must be an integer of 1 or more, found None"),
    ("min_tokens", 17, "min_tokens must be from 0 to max_tokens (16), found 17"),
    ("min_tokens", -1, "min_tokens must be an integer of 0 or more, found -1"),
    ("presence_penalty", 2.1, "presence_penalty must be a number from -2 to 2, found 2.1"),
    ("frequency_penalty", -3, "frequency_penalty must be a number from -2 to 2, found -3"),
    ("repetition_penalty", 0, "repetition_penalty must be a number above 0, found 0"),
    ("logprobs", -1, "logprobs must be an integer from 0 to 64, or None, found -1"),
    ("prompt_logprobs", 65, "prompt_logprobs must be an integer from 0 to 64, or None, found 65"),
    ("logit_bias", {5: 101}, "logit_bias of token 5 must be a number from -100 to 100, found 101"),
    ("logit_bias", {5: float("nan")}, "logit_bias of token 5 must be a number from -100 to 100, found nan"),
    ("logit_bias", {-1: 1.0}, "logit_bias must map token ids, integers of 0 or more, each once, to numbers, found (-1, 1.0)"),
    ("logit_bias", {"x": 1.0}, "logit_bias must map token ids"),
    ("logit_bias", {5: True}, "logit_bias must map token ids"),
    ("logit_bias", [(5, 1), (5, 2)], "each once, to numbers, found (5, 2)"),
    ("logit_bias", 7, "logit_bias must map token ids"),
    ("logit_bias", dict.fromkeys(range(1025), 1), "logit_bias has 1025 tokens; at most 1024 are allowed"),
    ("ignore_eos", 1, "ignore_eos must be True or False, found 1"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_values_are_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_defaults_and_edges() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, -1, 16)
    assert not params.greedy and not params.has_penalties and params.stop_strings == () and params.stop_ids == ()
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy and not SamplingParams(temperature=1e-5).greedy
    SamplingParams(top_p=1, top_k=0, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=2**63 - 1, logprobs=0, min_tokens=16)
    assert SamplingParams(repetition_penalty=1.1).has_penalties


def test_wire_round_trip() -> None:
    assert SamplingParams().to_wire() == {}
    params = SamplingParams(n=2, temperature=0, stop=["a", "b"], stop_token_ids=[7], seed=2**62, logprobs=0, ignore_eos=True, top_p=0.3)
    wire = json.loads(json.dumps(params.to_wire()))
    assert wire["stop"] == ["a", "b"] and "max_tokens" not in wire
    assert SamplingParams.from_wire(wire) == params
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert len({params, SamplingParams.from_wire(wire)}) == 1


def test_logit_bias_is_kept_as_pairs() -> None:
    params = SamplingParams(logit_bias={"7": -100, 3: 2.5})  # type: ignore[dict-item]
    assert params.biases == ((3, 2.5), (7, -100.0))
    assert SamplingParams(logit_bias={}).to_wire() == {}
    wire = json.loads(json.dumps(params.to_wire()))
    assert wire == {"logit_bias": [[3, 2.5], [7, -100.0]]}
    assert SamplingParams.from_wire(wire) == params and hash(params)


def test_ids_outside_of_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(ValueError, match="logit_bias has 10; the vocabulary has ids 0 to 9"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(ValueError, match="stop_token_ids has 12; the vocabulary has ids 0 to 9"):
        SamplingParams(stop_token_ids=[3, 12]).check_vocabulary(10)


def test_unknown_wire_names_are_listed() -> None:
    with pytest.raises(ValueError, match=r"unknown sampling parameters \['best_of'\]; known are \['n', 'temperature'"):
        SamplingParams.from_wire({"best_of": 3})
