"""What a survey sees of a simulated universe."""
