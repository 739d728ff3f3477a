"""What clients call models, and how urgent their requests are."""
