"""How long a pod will take: learnt online from what the proxy sees of it."""
