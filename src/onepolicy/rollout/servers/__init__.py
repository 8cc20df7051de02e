"""What the engines behind HTTP share."""
