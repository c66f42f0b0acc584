"""The only place that imports Ray: connecting, placing, spawning, watching, compiled graphs."""
