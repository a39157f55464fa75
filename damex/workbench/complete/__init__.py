"""``damex data complete``: labels that the other datasets of a mixture have."""
