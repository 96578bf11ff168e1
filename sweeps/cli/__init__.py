"""The command line: a module per group of commands, and all that is printed."""
