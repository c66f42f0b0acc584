"""Local processes: one way to spawn one, one way to notice its end."""
