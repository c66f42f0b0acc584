"""Local processes: one way to spawn one, one way to notice its end."""

from eagleray.process.malloc import malloc_trim
from eagleray.process.open_files import open_files_limit, raise_open_files_limit
from eagleray.process.parent import Parent
from eagleray.process.settle import settle
from eagleray.process.spawn import CRASHES, Child, explain_exit

__all__ = [
    "CRASHES",
    "Child",
    "Parent",
    "explain_exit",
    "malloc_trim",
    "open_files_limit",
    "raise_open_files_limit",
    "settle",
]
