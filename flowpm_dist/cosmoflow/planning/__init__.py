"""The plan of a training and its cost, known before TensorFlow is loaded."""
