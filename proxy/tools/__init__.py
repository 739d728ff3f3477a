"""Commands around the proxy: `kvlane doctor` and `kvlane import`."""
