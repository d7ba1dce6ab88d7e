"""MNIST: class-conditional digits, judged by a classifier."""
