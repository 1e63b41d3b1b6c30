"""The configuration of a run that goes on from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from aladdin_mpi.config.agreement import LOCAL_FIELDS
from aladdin_mpi.config.fields import kebab
from aladdin_mpi.config.settings import Setting, Settings, overlay, read_toml
from aladdin_mpi.errors import UserError

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
