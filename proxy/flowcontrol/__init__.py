"""Who may go on to a pod, and who waits for it how long."""
