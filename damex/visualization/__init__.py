"""Pictures of detections and of routing."""
