"""Which options a resumed run takes over, and on which all ranks must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import dotted, kebab
from aladdin_mpi.options.settings import Setting, Settings, overlay, read_toml

LOCAL_FIELDS = frozenset(
    {
        "bind_cores",
        "cache",
        "data_dir",
        "device",
        "download",
        "loader_start_method",
        "loader_workers",
        "overwrite",
        "progress",
        "quiet",
        "resume",
        "run_dir",
        "stage",
        "timeout",
    }
)
"""What may differ between ranks, since the result does not depend on it."""


def agreed(options: BaseModel) -> dict[str, Any]:
    """Return what all ranks must agree on: everything but ``LOCAL_FIELDS``, as JSON types."""
    return options.model_dump(mode="json", exclude=set(LOCAL_FIELDS))


def fingerprint(options: BaseModel) -> str:
    """Return the SHA-256 of :func:`agreed`, the same on every machine."""
    text = json.dumps(agreed(options), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return a line such as ``"aladdin.pi: 4 and 2"`` for each difference.

    ``a`` and ``b`` are configurations as :func:`agreed` gives them.
    """
    flat_a, flat_b = _flat(a), _flat(b)
    return [
        f"{dotted(path)}: {flat_a.get(path, 'absent')} and {flat_b.get(path, 'absent')}"
        for path in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(path, "absent") != flat_b.get(path, "absent")
    ]


def _flat(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in table.items():
        place = (*path, name)
        found |= _flat(value, place) if isinstance(value, Mapping) else {place: value}
    return found


SUMMARY = "summary.json"
"""The file in a run folder that holds the results."""
CONFIG_NAME = "config.toml"
"""The file in a run folder that holds the run's complete configuration."""

AUTO = "auto"
"""As the value of ``--resume``: the run in ``--run-dir``, if there is one to go on with."""

RESUME_FIELDS = (LOCAL_FIELDS - {"run_dir", "overwrite"}) | {
    "allow_resize",
    "check_images",
    "checkpoint_every",
    "corrupt_images",
    "evaluate_on",
    "log_every",
    "epochs",
    "samples",
    "spares",
    "steps",
    "worker_timeout",
}
"""What may be given beside ``--resume``."""

RESIZE_FIELDS = frozenset({"cluster", "ranks_per_host", "servers", "slowdown", "workers"})
"""What else may be given where the number of workers may change, and with it where they are."""

NOT_KEPT = frozenset({"allow_resize", "overwrite", "run_dir"})
"""What the stored configuration says only of the command that wrote it."""


def may_resize(given: Settings) -> bool:
    """Whether the number of workers may change."""
    setting = given.get(("allow_resize",))
    return setting is not None and bool(setting.value)


def resumed_options(model: type[BaseModel], given: Settings, run_dir: Path) -> Settings:
    """Return the configuration stored in ``run_dir`` with ``given`` over it.

    Raises:
        UserError: ``run_dir`` holds no configuration, or ``given`` has an option
            that a resumed run cannot change.
    """
    changeable = RESUME_FIELDS | (RESIZE_FIELDS if may_resize(given) else frozenset())
    refused = {path: s.origin for path, s in given.items() if path[0] not in changeable}
    if refused:
        allowed = ", ".join(f"--{kebab(name)}" for name in sorted(RESUME_FIELDS - {"resume"}))
        resize = "add --allow-resize, " if {path[0] for path in refused} <= RESIZE_FIELDS else ""
        raise UserError(
            f"{', '.join(refused.values())}: cannot be given together with --resume, which takes "
            f"the configuration of the run in {run_dir}; {resize}leave it out, or start a new run. "
            f"Beside --resume are possible: {allowed}"
        )
    if not (run_dir / CONFIG_NAME).is_file():
        raise UserError(
            f"--resume: expected the folder of a run, got {str(run_dir)!r}, which holds no "
            f"{CONFIG_NAME}; check the path"
        )
    stored = read_toml(model, run_dir / CONFIG_NAME, "--resume")
    kept = {path: s for path, s in stored.items() if path[0] not in NOT_KEPT}
    place = Setting(run_dir, "--resume")
    return overlay(model, kept, given | {("run_dir",): place})
