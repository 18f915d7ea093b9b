"""A declared network on a mesh, its losses, and the steps down its gradients."""
