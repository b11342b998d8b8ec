"""Runs as one HTML page and as plots."""
