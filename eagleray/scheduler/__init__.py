"""Decides what each step computes. Pure: values in, values out; no clock, no socket, no torch."""
