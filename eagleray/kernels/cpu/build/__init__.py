"""Build of the native library for the processor at hand: compiler, OpenMP runtime, cache of finished builds."""
