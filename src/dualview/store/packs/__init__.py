"""Packs: finished cells by the thousand in a few files."""
