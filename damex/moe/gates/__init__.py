"""Gates: logits -> Assignment."""
