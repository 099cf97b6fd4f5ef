"""Typed reading of a ``config.json``: every complaint names the field, what was found, and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Marks a field without a default.
REQUIRED: Any = object()


class Fields:
    """The fields of one JSON object. ``where`` names it in messages; ``prefix`` is put before field names."""

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.raw = raw
        self.where = where
        self.prefix = prefix

    def error(self, field: str, problem: str) -> ValueError:
        """A ValueError that names ``field``."""
        return ValueError(f"{self.where}: field '{self.prefix}{field}' {problem}")

    def get(self, field: str, default: Any = REQUIRED) -> Any:
        """The value of ``field``; ``default`` when it is absent.

        Raises:
            ValueError: absent, and there is no default.
        """
        if field in self.raw:
            return self.raw[field]
        if default is REQUIRED:
            raise self.error(field, "is missing")
        return default

    def integer(self, field: str, default: Any = REQUIRED, *, least: int = 1) -> int:
        """A whole number of at least ``least``; null counts as absent."""
        value = self.get(field, default)
        if value is None and default is not REQUIRED:
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(field, f"must be a whole number of at least {least}, found {value!r}")
        return value

    def optional_integer(self, field: str, default: Any = None, *, least: int = 1) -> int | None:
        """As ``integer``, but null or absent gives None (absent only if ``default`` is None)."""
        return None if self.get(field, default) is None else self.integer(field, default, least=least)

    def number(self, field: str, default: Any = REQUIRED) -> float:
        """A number above zero; null counts as absent."""
        value = self.get(field, default)
        if value is None and default is not REQUIRED:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(field, f"must be a number above 0, found {value!r}")
        return float(value)

    def optional_number(self, field: str) -> float | None:
        """As ``number``, but null, absent and 0 give None."""
        value = self.get(field, None)
        return None if value is None or value == 0 else self.number(field)

    def boolean(self, field: str, default: bool) -> bool:
        """true or false; null counts as absent."""
        value = self.get(field, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, found {value!r}")
        return value

    def choice(self, field: str, allowed: tuple[str, ...], default: Any = REQUIRED) -> str:
        """One of ``allowed``; null counts as absent."""
        value = self.get(field, default)
        if value is None and default is not REQUIRED:
            value = default
        if value not in allowed:
            raise self.error(field, f"must be one of {', '.join(allowed)}, found {value!r}")
        return str(value)

    def names(self, field: str, allowed: tuple[str, ...], length: int) -> tuple[str, ...]:
        """A list of ``length`` names, each in ``allowed``."""
        value = self.get(field)
        if not isinstance(value, list | tuple) or len(value) != length:
            found = f"{len(value)}" if isinstance(value, list | tuple) else repr(value)
            raise self.error(field, f"must be a list with one entry for each of the {length} layers, found {found}")
        for entry in value:
            if entry not in allowed:
                raise self.error(field, f"may hold {', '.join(allowed)}, found {entry!r}")
        return tuple(value)

    def section(self, field: str) -> Fields | None:
        """The object under ``field``; None when absent, null or empty."""
        value = self.get(field, None)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise self.error(field, f"must be an object, found {value!r}")
        return Fields(value, self.where, f"{self.prefix}{field}.")
