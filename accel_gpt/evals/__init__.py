"""Validation loss, HellaSwag, samples, tasks of lm-evaluation-harness."""
