"""Fix the lengthscale of a backbone's features on validation classes and write it into the backbone's card.

    python scripts/fit_lengthscale.py --backbone conv4.safetensors --dataset mini-imagenet
    python scripts/fit_lengthscale.py --backbone torchvision:resnet18 --dataset folder:PATH   (prints only)

`dpkl-calibrated` reads it from the card of the features or the backbone it is given.
fewshot-dpkl train does this at its end.
"""

from __future__ import annotations

import argparse

from fewshot_dpkl.backbones import load_backbone
from fewshot_dpkl.commands.cli import add_device_arguments, command_parser, use_device
from fewshot_dpkl.commands.validation import lengthscale_of, write_lengthscale
from fewshot_dpkl.data import open_split


def parse_arguments() -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--backbone", required=True, help="file of a trained backbone, or any other by name")
    parser.add_argument("--dataset", required=True, help="mini-imagenet, cub or folder:PATH (with val/)")
    parser.add_argument("--split", default="val", help="never the one to be tested on (default: %(default)s)")
    parser.add_argument("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    add_device_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = use_device(arguments)
    backbone = load_backbone(arguments.backbone)
    split = open_split(arguments.dataset, arguments.split, arguments.data_root)
    found = lengthscale_of(backbone, split, device)
    print(" ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if arguments.backbone.endswith(".safetensors"):
        write_lengthscale(arguments.backbone, found)
        print(f"wrote it into the card of {arguments.backbone}")
