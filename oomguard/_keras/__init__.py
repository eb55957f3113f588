"""Models of Keras: reads the configuration in a file, without Keras and TensorFlow, and builds the same in PyTorch."""
