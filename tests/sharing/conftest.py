"""Engines of these tests wait as long as a busy machine takes, and free host pages hold NaN."""

from __future__ import annotations

import pytest

from rorqual.engine.sharing import place, questions
from tests.sharing.process import be_patient


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    monkeypatch.setattr(place, "LIMITS", place.LIMITS)
    monkeypatch.setattr(questions, "PATIENCE_S", questions.PATIENCE_S)
    be_patient()
