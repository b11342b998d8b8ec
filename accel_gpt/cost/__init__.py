"""Memory, hours and disk of a config by arithmetic, for `plan`. No torch."""
