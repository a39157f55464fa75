"""What one does with datasets before a training: check, look, merge and plan."""
