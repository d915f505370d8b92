"""What a similarity is compared with: floors, where ICL and FT are unrelated, and ceilings."""
