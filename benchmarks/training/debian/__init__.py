"""Documents of Debian's packages, and questions about them (README.md)."""
