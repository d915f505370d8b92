"""What every room uses and knows nothing of models: files, downloads, the hub, errors, progress, tables of text."""
