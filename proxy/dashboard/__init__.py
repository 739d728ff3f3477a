"""The dashboard, as a page and in the terminal: the state of the fleet, computed while there are viewers."""
