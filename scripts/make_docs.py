"""Build the documentation as a site: `python scripts/make_docs.py [--out site]`. Opens no connection.

The pages are the repository's documents and, made from the code, the reference. Every warning of Sphinx, such as a link
or an anchor that leads nowhere, fails the build. The site is read from the disk or from any server of files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from docs_site.stage import write_sources
from sphinx.cmd.build import build_main

ROOT = Path(__file__).parents[1]
SETTINGS = Path(__file__).parent / "docs_site"
SITE_MARK = ".buildinfo"
"""File that Sphinx writes to the directory of a site."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="directory of the site (default: site)")
    arguments = parser.parse_args()
    if (arguments.out / SITE_MARK).exists():
        shutil.rmtree(arguments.out)  # pages that are no longer made would stay
    with tempfile.TemporaryDirectory() as directory:
        stage = Path(directory, "sources")
        write_sources(ROOT, stage)
        options = ["--conf-dir", str(SETTINGS), "--doctree-dir", f"{directory}/trees", "--fail-on-warning", "--quiet"]
        return build_main([*options, "--builder", "html", str(stage), str(arguments.out)])


if __name__ == "__main__":
    sys.exit(main())
