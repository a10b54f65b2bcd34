"""Models: images in, a ModelOutput out. They know nothing of devices."""
