"""The routes of pooling models: embeddings, classes, scores and ranks."""
