"""Transport of frames between processes. It knows no message types: callers pass in how to encode and decode."""
