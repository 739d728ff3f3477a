"""The HTTP face of a simulated pod: a file per API."""
