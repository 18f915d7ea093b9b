"""What a training is and takes, known before TensorFlow is loaded."""
