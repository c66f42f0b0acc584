"""What the user asked for, and nothing else.

Frozen values with the names of the command line's flags. What is learned at run time (addresses, block counts, the
model's geometry) has types of its own and is never written back here. Importable without torch.
"""
