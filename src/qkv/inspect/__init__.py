"""What a model is and what happened inside it."""
