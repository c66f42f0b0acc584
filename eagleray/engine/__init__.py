"""One data-parallel rank: takes requests, plans steps, publishes what they produce."""
