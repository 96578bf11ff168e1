"""The commands: one module per command, and `console` with what they share."""
