"""The reference API's names and defaults, as the tests walk them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SURFACE: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "api_surface.json").read_text(encoding="utf-8")
)
