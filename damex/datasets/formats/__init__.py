"""The folders that people have, read into COCO files: one reader per format."""
