"""A format of reasoning whose markers are tokens of every tokenizer of bytes, as a plugin of the server."""

from __future__ import annotations

from eagleray.client.answers.marked_reasoning import MarkedReasoning
from eagleray.client.answers.reasoning_formats import register_reasoning_format

register_reasoning_format(MarkedReasoning(name="chaos", start="^", end="~", template_markers=("^", "~")))
