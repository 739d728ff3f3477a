"""Several workers on one host: who holds their sockets, replaces them, and speaks for them."""
