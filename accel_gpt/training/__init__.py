"""What a step needs: gradients, losses, the guard, metrics, and what a run prints."""
