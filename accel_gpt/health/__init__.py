"""Tell whether a run is healthy."""
