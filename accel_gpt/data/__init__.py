"""Tokenizers, token shards (local, remote, other projects'), data order, mixtures, the loader."""
