"""The commands of `accel-gpt`, one file each."""
