"""A decode step in one launch."""
