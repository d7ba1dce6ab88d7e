"""What confidence costs in time and memory."""
