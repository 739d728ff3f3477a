"""The prefix index: prompt -> chained block hashes -> which pod holds which blocks."""
