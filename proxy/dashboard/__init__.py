"""The dashboard, as a page at the admin port and in the terminal: the live state of the fleet, computed while there are
viewers."""
