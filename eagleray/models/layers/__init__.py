"""The parts that models are made of. A layer takes its weights by name when it is made, and computes with kernels."""
