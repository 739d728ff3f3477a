"""What is done when a pod is slow or fails."""
