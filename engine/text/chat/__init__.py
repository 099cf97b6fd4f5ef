"""From chat messages to the prompt text a model was trained on."""

from __future__ import annotations

from .render import ChatFormat, load_chat_format, render_chat
from .renderer import ChatRenderer

__all__ = ["ChatFormat", "ChatRenderer", "load_chat_format", "render_chat"]
