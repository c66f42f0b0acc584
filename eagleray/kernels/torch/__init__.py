"""The torch backend: the reference that every other backend is compared with."""
