"""What a similarity must be held against: other contexts, other fine-tunings, untrained models, and itself again."""
