"""Every option with its unit, default and checks; YAML and command line. No torch."""
