"""Configuration: the options that the user set, and nothing else.

Frozen values with the names of the command line's flags. Facts learned at run time (addresses, block counts, the
model's geometry) have types of their own and are never written back here. Importable without torch.
"""
