"""A folder that keeps what every finished fold predicted, so that a calibration that was killed goes on where it was.

Files hold arrays and numbers, never code, and are written whole or not at all.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

from geoq import artifact
from geoq.folds import FoldPlan
from geoq.surrogate import Array, to_tensor

MANIFEST = "calibration.geoq"
GROUPS = "groups.geoq"


@dataclass(frozen=True)
class Checkpoint:
    """Predictions of the finished folds of one calibration."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path, facts: Mapping[str, str]) -> "Checkpoint":
        """Start or continue a checkpoint of the calibration that these facts describe.

        Raises:
            ValueError: the folder belongs to a calibration with other data, folds or settings.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        manifest = place / MANIFEST
        if not manifest.exists():
            stray = [path.name for path in place.glob("fold-*.geoq")]
            if stray:
                raise ValueError(
                    f"{place} holds {stray[0]} but no {MANIFEST}, so nobody knows what it is of; use an empty folder."
                )
            artifact.write(manifest, dict(facts), {})
        known, _ = artifact.read(manifest)
        differences = [
            f"{name} was {known.get(name)}, now {facts.get(name)}"
            for name in {**known, **facts}
            if known.get(name) != facts.get(name)
        ]
        if differences:
            raise ValueError(
                f"{place} is the checkpoint of another calibration: {'; '.join(differences)}; "
                "use another folder, or delete this one."
            )
        return cls(place)

    def groups(self, proposed: list[list[int]]) -> list[list[int]]:
        """Folds that are trained together: as proposed the first time, and the same ever after."""
        file = self.folder / GROUPS
        if not file.exists():
            artifact.write(file, {"groups": proposed}, {})
        groups: list[list[int]] = artifact.read(file)[0]["groups"]
        return groups

    def has(self, fold: int) -> bool:
        """Whether the fold is finished."""
        return self._file(fold).exists()

    def load(self, fold: int) -> Float[Tensor, " n *output"]:
        """What the fold's surrogate predicted."""
        try:
            return artifact.read(self._file(fold))[1]["prediction"]
        except ValueError as exc:
            exc.add_note(f"delete {self._file(fold)}; the fold is then trained again")
            raise

    def save(self, fold: int, prediction: Float[Tensor, " n *output"]) -> None:
        """Keep a finished fold."""
        artifact.write(self._file(fold), {"fold": fold}, {"prediction": prediction})

    def _file(self, fold: int) -> Path:
        return self.folder / f"fold-{fold + 1:04d}.geoq"


def of_array(array: Array) -> str:
    """What tells an array from another: kind, shape and a hash of the values."""
    values = array
    if not isinstance(array, np.ndarray):
        values = to_tensor(array, "array").detach().cpu().numpy()
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return f"{values.dtype} {values.shape} {digest[:16]}"


def of_object(thing: object) -> str:
    """An object in words that are the same in another process; a plain function is known by its name alone."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def of_folds(plan: FoldPlan) -> str:
    """The scheme of the folds, and a hash of the rows that they keep in and hold out."""
    digest = hashlib.sha256(json.dumps([len(plan.splits)]).encode())
    for rows in plan.splits:
        for part in rows:
            digest.update(of_array(np.asarray(part, dtype=np.int64)).encode())
    return f"{of_object(plan)} with rows {digest.hexdigest()[:16]}"
