"""Few-shot heads on frozen features: DPKL and its rivals."""
