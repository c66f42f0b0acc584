"""The groups of workers that compute one model together: their coordinates and the operations between them."""
