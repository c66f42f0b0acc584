"""Executor whose workers are called through a compiled graph of Ray. When it goes: docs/decisions/0013-ray-graph.md."""
