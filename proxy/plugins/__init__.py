"""The built-in plugins, one file each. The registry finds a plugin type by its file."""
