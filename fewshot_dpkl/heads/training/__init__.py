"""How particle classifiers learn: starts, layers, similarities, steps in torch and in C."""
