"""The `vramcast` command, installed with the wheel."""

from __future__ import annotations

import sys

from vramcast import _core


def main() -> None:
    sys.exit(_core.main(["vramcast", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
