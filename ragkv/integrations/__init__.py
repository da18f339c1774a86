"""Integrations with other frameworks. Each needs its own extra and is imported only when used."""
