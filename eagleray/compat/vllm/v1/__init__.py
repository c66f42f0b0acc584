"""Names of vLLM's second engine."""
