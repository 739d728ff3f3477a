"""The page at the admin port: what is slow, what is sick, and why, live; nothing is computed while nobody looks."""
