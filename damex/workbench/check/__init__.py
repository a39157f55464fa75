"""The data before a training: check, browse, labels, convert and prepare."""
