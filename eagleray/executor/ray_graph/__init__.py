"""Executor whose workers are called through a compiled graph of Ray."""
