"""Triton kernels, each with the function that launches it.

A launching function writes into tensors that its caller owns, allocates nothing, and reads nothing back from the
device, so that a CUDA graph can capture it. Numbers of a batch that vary from step to step (tokens, rows) are read on
the device. The torch backend defines what each kernel computes.

Triton compiles a kernel for each set of its constants, and again where a number is 1 or a multiple of 16. Numbers of a
step are exempt from that, so that a new number of tokens compiles nothing.
"""
