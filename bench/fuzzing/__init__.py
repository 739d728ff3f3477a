"""The parts of `bench/fuzz.py`: what makes inputs, and a module for each kind of place where bytes come in."""
