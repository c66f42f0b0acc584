"""The Ray context of a program."""

from __future__ import annotations

import subprocess
import sys


def test_current_ray_context_does_not_import_ray() -> None:
    program = (
        "import sys; from eagleray.cluster.context import current_ray_context; "
        "print(current_ray_context(), 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "None False"
