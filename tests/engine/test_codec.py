"""Plans and commands survive the wire; damaged messages are refused."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rorqual.engine.codec import decode_arrays, decode_plan, encode_arrays, encode_plan
from rorqual.engine.messages import AbortRequest, AddRequest, Ask, Fail, decode_ask, decode_commands, encode_ask, encode_commands
from rorqual.engine.plan import StepPlan
from rorqual.engine.records import Event, Report, decode_report, encode_report
from rorqual.engine.sampling_params import SamplingParams

ARRAYS = st.sampled_from(["int32", "int64", "float64", "bool"]).flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5))
)


@given(
    st.dictionaries(st.text(max_size=6), ARRAYS, max_size=4), st.dictionaries(st.text(max_size=3), st.integers(-(2**53), 2**53), max_size=3)
)
def test_arrays_round_trip(arrays, scalars):
    found, numbers = decode_arrays(encode_arrays(arrays, scalars))
    assert numbers == scalars and list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array, equal_nan=array.dtype.kind == "f")


def test_plan_round_trip():
    plan = StepPlan(step=9, slots=np.array([3, 1], np.int32), starts=np.array([5, 0], np.int32), counts=np.array([1, 4], np.int32))
    plan.samples = np.array([True, False])
    plan.pages = np.array([[3, 0, 7]], np.int32)
    found = decode_plan(encode_plan(plan))
    for f in fields(StepPlan):
        assert np.array_equal(getattr(found, f.name), getattr(plan, f.name)), f.name
    assert (found.n_rows, found.n_tokens, found.n_samples) == (2, 5, 1)


def test_damaged_messages_are_refused():
    data = encode_arrays({"a": np.arange(4)}, {})
    with pytest.raises(ValueError, match="'a' of shape .* ends after the"):
        decode_arrays(data[:-3])
    with pytest.raises(ValueError, match="its header describes"):
        decode_arrays(data + b"x")
    with pytest.raises(ValueError, match="unknown dtype 'object'"):
        decode_arrays(
            data.replace(b"\xa5int64", b"\xa6object").replace(data[:4], (int.from_bytes(data[:4], "little") + 1).to_bytes(4, "little"), 1)
        )
    with pytest.raises(ValueError):
        decode_arrays(b"\x02\x00\x00\x00\xc1\xc1")
    with pytest.raises(ValueError, match="message has 3 bytes, less than the 4"):
        decode_arrays(data[:3])


def test_commands_round_trip():
    params = SamplingParams(max_tokens=5, stop=["x"], seed=4)
    commands = [
        AddRequest(request_id="0-0.0", index=1, dp_rank=2, prompt_ids=[1, 2], params=params.to_wire(), priority=3),
        AbortRequest(request_id="0-0.0"),
        Fail(message="no"),
        Ask(name="stats", args={"deep": [1, "x"]}),
    ]
    assert decode_ask(encode_ask(commands[-1])) == commands[-1]
    assert decode_commands(encode_commands(commands)) == commands
    request = decode_commands(encode_commands(commands))[0].request()
    assert request.params == params and request.prompt_ids == [1, 2] and request.priority == 3


def test_events_round_trip():
    events = [
        Event(request_id="a", token_ids=[1], text="é", logprobs=[[[1, -0.5, 1]]]),
        Event(request_id="b", token_ids=[], text="", finish_reason="abort", cached_tokens=64),
    ]
    report = Report(events=events, notes={"load": [1, 2]})
    assert decode_report(encode_report(report)) == report
    with pytest.raises(ValueError):
        decode_report(b"\xc1")
