"""LMDB's data file, read without LMDB: LMDB follows whatever the file says, so the file is checked first."""
