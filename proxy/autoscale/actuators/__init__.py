"""Those who bring a role to its size, behind one port; one file each."""
