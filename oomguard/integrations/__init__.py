"""Integrations with other packages. Each module is imported by itself and needs only the package of its name."""
