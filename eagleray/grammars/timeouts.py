"""Time limits around the libraries of grammars."""

from __future__ import annotations

LOAD_SECONDS = 60.0
"""Time that loading a library may take: xgrammar imports torch and transformers."""
