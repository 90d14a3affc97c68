"""Computes parts of the model anew, on inputs that are made up, so that equals can compare what comes of it."""
