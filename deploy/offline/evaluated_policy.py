"""The model that `headway eval` scores: a folder, a hub name, or a version of a run."""

import re
from dataclasses import dataclass
from pathlib import Path

from deploy.offline.export import checkpoints_of, export_model
from deploy.preflight.models import find_model, fingerprint_of_model, model_path
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_lock import RunMissing
from headway.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model that is evaluated."""

    name: str
    """As it was named, with the version of a run: "mine@40"."""
    checksum: str
    """Checksum of the weights as the run published them, or fingerprint of the folder."""
    version: int | None = None
    """Version of a run; None for a model folder or hub name."""
    run: RunDirectory | None = None
    path: str = ""
    """Folder or hub name; "" for a checkpoint."""

    def folder(self, copy: Path) -> str:
        """Return the folder or hub name with the weights; a checkpoint is copied into `copy` first.

        So it stays the same, whatever the run trains, saves and deletes meanwhile.
        """
        if self.path or self.run is None:
            return self.path
        export_model(self.run, copy, version=self.version)
        return str(copy.absolute())


def find_policy(name: str, runs_dir: Path) -> Policy:
    """Find what a name means: RUN@VERSION, a run (its newest checkpoint), or a model.

    Raises InputError if it is none of them, or the run has no such checkpoint.
    """
    numbered = re.fullmatch(r"(.+)@(\d+)", name)
    folder, wanted = (numbered[1], int(numbered[2])) if numbered else (name, None)
    try:
        run = RunDirectory.open(folder, runs_dir)
    except RunMissing as missing:
        if numbered:
            raise
        try:
            path = find_model(name, setting="the model")
        except InputError as error:
            raise InputError(f"{missing}; as a model, {error}") from None
        return Policy(name=name, checksum=fingerprint_of_model(path), path=path)
    if wanted == 0:
        path = model_path(run.config())
        return Policy(name=name, checksum=fingerprint_of_model(path), version=0, run=run, path=path)
    chosen = checkpoints_of(run, wanted)[-1]
    return Policy(
        name=f"{folder}@{chosen.version}",
        checksum=chosen.weights_checksum or "",
        version=chosen.version,
        run=run,
    )
