"""The formats of quantized checkpoints, a module for each: pure functions from stored tensors to weights in groups."""
