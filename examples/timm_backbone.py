"""Classify pictures of your own with a timm model, here a vision transformer (needs `pip install timm`).

python examples/timm_backbone.py birds/ new/ --model vit_small_patch14_dinov2.lvd142m
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fewshot_dpkl import FewShotClassifier
from fewshot_dpkl.backbones import load_backbone
from fewshot_dpkl.data import read_query, read_support

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
parser.add_argument("support", type=Path, help="folder with a folder of pictures per class")
parser.add_argument("query", type=Path, help="folder of pictures to classify")
parser.add_argument("--model", default="vit_small_patch14_dinov2.lvd142m", help="see timm.list_models()")
parser.add_argument("--untrained", action="store_true", help="random weights, without a download")
arguments = parser.parse_args()

support, query = read_support(arguments.support), read_query([arguments.query])  # hidden files are left out

# FewShotClassifier(f"timm:{model}") does the same with trained weights.
backbone = load_backbone(f"timm:{arguments.model}", pretrained=not arguments.untrained)
# What is no picture is skipped with a warning.
classifier = FewShotClassifier(backbone, on_unreadable="skip").fit(support.paths, support.labels)
answers, probabilities = classifier.predict(query.paths), classifier.predict_proba(query.paths).max(1)
for path, answer, probability in zip(query.paths, answers, probabilities, strict=True):
    print(path, answer, f"{probability:.3f}")
