"""Models of transformers: start from one, export to one, and prove that both compute the same."""
