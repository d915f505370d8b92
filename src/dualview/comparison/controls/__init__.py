"""What a similarity is compared with: other contexts, other fine-tunings, untrained models, ICL in another order."""
