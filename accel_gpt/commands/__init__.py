"""The commands of `accel-gpt`, a file each, and what several of them share."""
