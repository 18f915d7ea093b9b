"""Mesh TensorFlow operations of our own, one a file, each with its true adjoint."""
