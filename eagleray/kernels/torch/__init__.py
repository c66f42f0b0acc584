"""Torch implementation of the kernel operations: the reference that every other backend is compared with."""
