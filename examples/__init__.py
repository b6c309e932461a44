"""Programs that show what Penstock does."""
