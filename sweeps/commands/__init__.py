"""What the command line does: one room per command, and what all of them share."""
