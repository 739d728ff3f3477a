"""What if: requests that were recorded, before other configurations, on a virtual clock."""
