"""Small-data regression: GP, DKL and DPKL, with and without unlabelled inputs."""
