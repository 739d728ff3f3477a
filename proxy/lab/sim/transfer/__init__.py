"""How the KV cache of a prompt gets from one simulated pod to another: a file per connector of the real engines."""
