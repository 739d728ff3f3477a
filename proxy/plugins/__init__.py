"""One file per plugin: a type exists because its file does."""
