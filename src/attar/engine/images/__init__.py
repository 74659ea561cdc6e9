"""Images in the engine: features of images, when the vision tower computes them, and which requests need them."""
