"""RORQUAL_DEBUG means the same everywhere."""

import pytest

from rorqual.parallel.debug import debugging


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("2", True), ("yes", True)])
def test_anything_but_nothing_and_zero_turns_it_on(monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("RORQUAL_DEBUG", raising=False)
    else:
        monkeypatch.setenv("RORQUAL_DEBUG", value)
    assert debugging() is on
