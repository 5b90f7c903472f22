"""Nothing is needed of it."""
