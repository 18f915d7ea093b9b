"""A Horovod wheel for the installed TensorFlow, built from the source release.

Runs on the standard library alone, before any package is installed.
"""
