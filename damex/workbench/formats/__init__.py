"""Dataset folders in common formats, converted to COCO files: one reader per format."""
