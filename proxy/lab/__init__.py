"""What-if simulation: replay recorded requests through other configurations, on a virtual clock."""
