"""Expert report: routing of each dataset's tokens to experts."""
