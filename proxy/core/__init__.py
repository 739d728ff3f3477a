"""The domain vocabulary and the extension points. Imports the standard library only and does no I/O."""
