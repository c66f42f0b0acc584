"""How workers compute one model together: who has which part, and the few operations between them."""
