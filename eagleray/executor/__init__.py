"""Sends the engine's calls to every worker and collects their replies."""
