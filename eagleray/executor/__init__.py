"""Repeats the engine's decisions to every worker and collects what they answer."""
