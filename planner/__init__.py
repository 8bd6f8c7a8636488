"""Plan how to train a network that is larger than GPU memory; runs anywhere, without torch."""
