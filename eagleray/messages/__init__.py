"""Messages between processes: frozen values, with one union for each wire (`wires` lists them)."""
