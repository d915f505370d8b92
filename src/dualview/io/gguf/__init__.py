"""GGUF files: fetched by hash, read as ordinary models, converted once."""
