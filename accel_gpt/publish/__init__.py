"""Publish a run: uploads while it trains, pushes to the Hub, the model card, GGUF."""
