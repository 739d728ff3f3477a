"""Reading what requests ask for, wherever it takes least from the others."""
