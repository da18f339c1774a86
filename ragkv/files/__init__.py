"""The files of an index and of its owner: opened as plain files, written whole, TOML read within bounds."""
