"""The fleet in a terminal: what the dashboard is told, drawn with text."""
