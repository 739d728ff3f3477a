"""The prefix index: prompt -> chained block hashes -> pods that hold the blocks."""
