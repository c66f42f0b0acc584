"""The live page: its document of state, the stream of it, and the page itself."""
