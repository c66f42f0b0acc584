"""Builds the native library for this processor: compiler, OpenMP runtime, cache of built files."""
