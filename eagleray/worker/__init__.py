"""One device: computes the steps that the engine plans. The first layer that imports torch, beside `models`."""
