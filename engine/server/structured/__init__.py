"""Structured output over HTTP: what requests ask for, compiled in a process of its own."""

from .service import Structured, StructuredBusy

__all__ = ["Structured", "StructuredBusy"]
