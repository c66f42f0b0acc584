"""The directory that a program is given in PYTHONPATH."""
