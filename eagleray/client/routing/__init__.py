"""Choice of the engine for a request: known engines, their load, and the prefixes they hold."""
