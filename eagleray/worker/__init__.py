"""One device, one process: computes what the engine plans. The first layer that imports torch beside `models`."""
