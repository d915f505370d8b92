"""The equations of `theory` on the weights and activations of a Hugging Face model."""
