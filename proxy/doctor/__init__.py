"""What real pods are like: asked for it, and tried."""
