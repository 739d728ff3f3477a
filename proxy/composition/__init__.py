"""What the composition root is made of: each part constructs what belongs together, and changes it in a reload."""
