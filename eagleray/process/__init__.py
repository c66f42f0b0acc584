"""Local processes: spawning them and noticing their exit."""
