"""The parts of a model. A layer declares its tensors by name when it is made, and computes with kernels."""
