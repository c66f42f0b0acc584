"""The engine's options and its asynchronous interface."""
