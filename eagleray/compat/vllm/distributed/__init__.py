"""Ranks of workers, and requests of weight transfers."""
