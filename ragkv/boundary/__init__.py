"""What crosses the boundary of the process: files that others made, text to be shown, plug-ins of other packages."""
