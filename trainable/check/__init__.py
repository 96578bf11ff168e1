"""What is known of a task before it trains."""
