"""The engine, one data-parallel rank: receives requests, plans steps, and publishes their tokens."""
