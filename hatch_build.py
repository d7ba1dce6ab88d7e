"""Writes the commit into the package when it is built, so that installed code can name it without asking git."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {"wheel": "fmwc", "sdist": "src/fmwc"}  # where the package lies in each kind of archive


class CommitHook(BuildHookInterface):
    """Adds `fmwc/_commit.py`. An editable install reads its checkout instead, which moves on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("fmwc_provenance", root / "src/fmwc/provenance.py")
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        commit = found.commit_of(root)
        if version == "editable" or commit == found.UNKNOWN:  # an unpacked sdist has the file already
            return
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / found.BAKED
        path.write_text(f'COMMIT = "{commit}"\n')
        build_data["force_include"][str(path)] = f"{PLACES[self.target_name]}/{found.BAKED}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
