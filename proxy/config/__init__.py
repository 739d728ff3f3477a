"""Load, check, compare and replace configurations."""
