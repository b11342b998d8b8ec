"""Evaluations inside a run: validation loss, HellaSwag; samples."""
