"""Model files in GGUF, the format of llama.cpp: their header becomes the JSON files of a checkpoint in the cache."""
