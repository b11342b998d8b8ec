"""What a step needs: Accelerator, gradient accumulation, checkpoints, resume, metrics."""
