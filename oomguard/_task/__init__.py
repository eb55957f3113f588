"""Task: the user's own model, loss and data, its batches, its estimate, and the check of knobs on it."""
