"""MNIST and other images with classes: data, the classifier that judges, the training recipe, and the domain."""
