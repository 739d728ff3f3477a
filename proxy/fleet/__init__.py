"""The pods: their discovery, their reported state, and the load that this proxy has put on them."""
