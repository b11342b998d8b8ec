"""Publish a run: uploads while it trains, pushes to the Hub, its card, a GGUF file."""
