"""Files and folders: locks."""
