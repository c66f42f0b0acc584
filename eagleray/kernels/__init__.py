"""The computations of the layers: an interface, and one package for each backend."""
