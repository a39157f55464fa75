"""What one source paper alone needs; the core imports none of it."""
