"""Summaries of Ray's errors, in one line each. Pure."""

from __future__ import annotations

import re

ADVICE = re.compile(r"(Some common causes include|There are some potential root causes).*", re.DOTALL)
DETAIL = re.compile(r"Worker exit detail: (.*)", re.DOTALL)
DEATH = re.compile(r"The actor is dead because (.*)", re.DOTALL)
FIELD = re.compile(r"(class_name|actor_id|pid|name|namespace|ip): ")
IDS = re.compile(r",? (bundle index|lease id|actor id|worker id|Lease ID): \w+")


def summarize(text: str) -> str:
    """Return the cause that `text`, the message of a Ray error, names: without ids, tables, tracebacks and advice."""
    if "end of file" in text.lower() and "connection error code 2" in text.lower():
        return "its process died (killed, crashed, or out of memory)"
    if "is unavailable" in text:
        return "its node does not answer"
    text = ADVICE.sub("", text)
    for pattern in (DETAIL, DEATH):
        if match := pattern.search(text):
            return _one_line(IDS.sub("", match[1]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "Traceback" in text or "creation task" in text or "ray::" in text:
        return lines[-1]  # the exception itself
    return _one_line(" ".join(line for line in lines if not FIELD.match(line)))


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
