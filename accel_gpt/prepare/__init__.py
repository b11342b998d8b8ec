"""Text to token shards."""
