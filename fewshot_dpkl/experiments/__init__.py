"""The paper's experiments beside few-shot episodes: MNIST and UCI, and the page that compares all heads."""
