"""Classify pictures of your own with a timm model, here a vision transformer (needs `pip install timm`).

python examples/timm_backbone.py birds/ new/ --model vit_small_patch14_dinov2.lvd142m
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fewshot_dpkl import FewShotClassifier
from fewshot_dpkl.backbones import load_backbone

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
parser.add_argument("support", type=Path, help="folder with a folder of pictures per class")
parser.add_argument("query", type=Path, help="folder of pictures to classify")
parser.add_argument("--model", default="vit_small_patch14_dinov2.lvd142m", help="see timm.list_models()")
parser.add_argument("--untrained", action="store_true", help="random weights, without a download")
arguments = parser.parse_args()

support = sorted(arguments.support.glob("*/*.*"))
query = sorted(arguments.query.rglob("*.*"))

# FewShotClassifier(f"timm:{model}") does the same with trained weights.
backbone = load_backbone(f"timm:{arguments.model}", pretrained=not arguments.untrained)
classifier = FewShotClassifier(backbone, head="dpkl").fit(support, [path.parent.name for path in support])
for path, row in zip(query, classifier.predict_proba(query), strict=True):
    print(path, classifier.classes_[row.argmax()], f"{row.max():.3f}")
