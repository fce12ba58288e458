"""Signs, verifies, renders and pictures the example receipts with the documented commands.

    python -m suites.selfcheck.reports.examples
    python -m suites.selfcheck.reports.examples --pictures h200-kernels

The key is made for the occasion: its private half signs and is gone, its public half is kept beside the
examples, so that nobody can sign in its name later. With --key an existing key signs.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer
from typer.testing import CliRunner

from reports import commands
from suites.selfcheck.reports.shots import shoot

ROOT = Path(__file__).parents[3]
EXAMPLES, IMAGES = ROOT / "reports" / "examples", ROOT / "docs" / "images"
PUBLIC_KEY = "demonstration.pub"
SECTIONS = ("errors",)
MAX_IMAGE_BYTES = 600_000


class StepError(RuntimeError):
    """A command did not end as it must."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Signs every example in a folder and pictures one of them.

    Raises:
        StepError: a receipt does not hold, or the pictures are too large.
    """
    options = _parser().parse_args(arguments)
    folders = sorted(f for f in options.folder.iterdir() if list(f.glob("receipt.json*")))
    if not folders:
        raise StepError(f"{options.folder} must hold folders with a receipt.json, got none; check the path")
    with tempfile.TemporaryDirectory() as temporary:
        key = options.key or _new_key(Path(temporary) / "key.pem")
        shutil.copy(f"{key}.pub", options.folder / PUBLIC_KEY)
        for folder in folders:
            sign(folder, key, options.folder / PUBLIC_KEY)
    if options.pictures:
        picture(options.folder / options.pictures / commands.PAGE, options.images)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=EXAMPLES, help="holds one folder for each example")
    parser.add_argument("--key", type=Path, help="a private key; KEY.pub is its public half")
    parser.add_argument("--pictures", default="", help="the example to take pictures of")
    parser.add_argument("--images", type=Path, default=IMAGES, help="where the pictures go")
    return parser


def _new_key(path: Path) -> Path:
    qualify("keygen", path)
    return path


def sign(folder: Path, key: Path, public: Path) -> None:
    """Signs the receipt of one folder, verifies it with the public key, and writes its page and summary."""
    qualify("sign", folder, "--key", key)
    qualify("verify", folder, "--key", public)
    summary = folder / "summary.md"
    qualify("export", folder, "--html", folder / commands.PAGE, "--markdown", summary)


def qualify(*words: object) -> str:
    """Runs a command about receipts in this process, shows both it and what it said.

    Raises:
        StepError: its exit code is not 0.
    """
    app = typer.Typer()
    commands.register(app)
    line = [str(word) for word in words]
    print("$ qualify", shlex.join(line))
    result = CliRunner().invoke(app, line)
    print(result.output, end="", flush=True)
    if result.exit_code != 0:
        raise StepError(f"qualify {line[0]} must end with 0, got {result.exit_code}: {result.exception}")
    return result.output


def picture(page: Path, images: Path) -> None:
    """Takes pictures of a page in light, in dark, on paper and of two sections.

    Raises:
        StepError: they are larger in all than documentation should carry.
    """
    shoot(page, images, list(SECTIONS))
    sizes = {path.name: path.stat().st_size for path in sorted(images.glob("*.png"))}
    print(", ".join(f"{name} {size:,} bytes" for name, size in sizes.items()))
    if sum(sizes.values()) > MAX_IMAGE_BYTES:
        raise StepError(f"pictures must have {MAX_IMAGE_BYTES:,} bytes in all, got {sum(sizes.values()):,}")


if __name__ == "__main__":
    main()
