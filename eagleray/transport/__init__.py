"""Moves frames between processes. Knows no message: what to encode and decode with is handed in."""
