"""A page on this machine: drop pictures into classes, drop pictures to classify, see probabilities.

    fewshot-dpkl demo
    fewshot-dpkl demo --backbone conv4-mini-imagenet --backbone torchvision:resnet18 --port 8642

Open the address it prints. It answers to this machine alone (127.0.0.1); pictures are turned into features in
memory and not stored. "Save model" gives a file for fewshot-dpkl classify --model.
"""

from __future__ import annotations

import argparse

from fewshot_dpkl.commands.cli import command_parser
from fewshot_dpkl.pictures.page import Session, make_server


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument(
        "--backbone",
        action="append",
        metavar="NAME",
        help="offered on the page, can be repeated; a shipped name, torchvision:NAME, timm:NAME or file "
        "(default: conv4-mini-imagenet)",
    )
    parser.add_argument("--port", type=int, default=8642, help="0 takes a free one (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port is {arguments.port}; expected a number from 0 to 65535")
    session = Session(list(dict.fromkeys(arguments.backbone or ["conv4-mini-imagenet"])))
    try:
        server = make_server(session, arguments.port)
    except OSError as error:
        raise OSError(
            f"cannot listen on port {arguments.port}: {error.strerror}; choose another --port"
        ) from error
    print(f"open http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()
