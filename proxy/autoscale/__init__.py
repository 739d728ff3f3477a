"""Autoscaling: the number of replicas for each role."""
