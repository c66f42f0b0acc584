"""Summaries of Ray's errors."""

from __future__ import annotations

import pytest

from eagleray.cluster.ray_errors import summarize

HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: Host
\tactor_id: 15046edd8613daff92a17dd001000000
\tpid: 10002
\tname: x/y
\tnamespace: n
\tip: 192.0.2.2
"""
CAUSE = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
ADVICE = " Some common causes include: (1) the process was killed by the OOM killer, (2) something else."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            f"{HEAD}{CAUSE}Worker unexpectedly exits with a connection error code 2. End of file.{ADVICE}",
            "its process died (killed, crashed, or out of memory)",
        ),
        (
            f"{HEAD}{CAUSE}Worker exits unexpectedly. Worker exits with an exit code 3.",
            "Worker exits unexpectedly. Worker exits with an exit code 3",
        ),
        (f"{HEAD}The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`"),
        (
            f"{HEAD}{CAUSE}Destroying worker since its placement group was removed. Placement group id: d76b, "
            "bundle index: 0, lease id: 0a, actor id: 34e5, worker id: 31e1",
            "Destroying worker since its placement group was removed. Placement group id: d76b",
        ),
        (
            "The actor died because of an error raised in its creation task, ray::B.__init__() (pid=1)\n"
            "  File \"a.py\", line 1, in f\n    import nosuch\nModuleNotFoundError: No module named 'nosuch'",
            "ModuleNotFoundError: No module named 'nosuch'",
        ),
        ("Get timed out: some object(s) not ready.", "Get timed out: some object(s) not ready"),
        ("", ""),
    ],
)
def test_summarize_ray_error_is_one_line(text: str, line: str) -> None:
    assert summarize(text) == line
