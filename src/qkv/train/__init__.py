"""The loop that trains every family, and what it leaves behind."""
