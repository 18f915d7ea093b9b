"""A job that is not the package's: two files, and a line in the register (`__main__`)."""
