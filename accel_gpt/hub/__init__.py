"""Weights and configs of transformers, export, the Hugging Face Hub."""
