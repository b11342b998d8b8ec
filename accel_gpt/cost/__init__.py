"""Parameters, FLOPs, memory and devices by arithmetic. No torch."""
