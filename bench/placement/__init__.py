"""A fleet of simulated pods on a virtual clock, the routers that place requests on it, and what comes of it."""
