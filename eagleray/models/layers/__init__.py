"""The parts of a model. A layer loads its weights by name when it is made, and computes with kernels."""
