"""Where pods come from while the program runs: a file per origin."""
