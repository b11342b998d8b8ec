"""What a run keeps on disk: its folder, its state, checkpoints, and how it resumes."""
