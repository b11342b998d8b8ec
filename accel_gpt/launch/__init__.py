"""How a launch starts: ranks, device, Accelerator, precision, compile, stopping."""
