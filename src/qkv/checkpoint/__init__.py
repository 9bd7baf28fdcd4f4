"""Models on disk: our own format, and others'."""
