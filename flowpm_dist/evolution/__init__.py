"""From the first to the last step: integrators, kicks and drifts, and the way back."""
