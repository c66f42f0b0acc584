"""The modules beside the scripts are imported as the scripts import them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
