"""What crosses a process: frozen values, one union for each wire (`wires` lists them)."""
