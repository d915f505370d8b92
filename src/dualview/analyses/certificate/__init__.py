"""The verdict's certificate: known things under it, and how often it is right."""
