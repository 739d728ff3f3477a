"""The pods: which there are, what they say about themselves, and what this proxy has put on them."""
