"""The CPU backend: recorded forward passes that run as one call of a native library."""
