"""TFDS builders that need no TensorFlow: files from package clients, ArrayRecord shards."""
