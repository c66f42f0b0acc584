"""Tests import the modules of scripts/ in the same way as the scripts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
