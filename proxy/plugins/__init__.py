"""The built-in plugins, one file each. The registry imports every file here and takes the classes marked with
`@plugin`."""
