"""Integrations with other frameworks; each module is importable without the others."""
