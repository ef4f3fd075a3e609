"""Checkpoints: a folder with the predictions of every finished fold, from which an interrupted calibration continues.

The files contain arrays and numbers, and no code. Each file is written completely or not at all.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq import archive
from geoq.arrays import Array, to_tensor
from geoq.fold_plan import FoldPlan

MANIFEST = "calibration.geoq"
JOBS = "jobs.geoq"

# Relative difference up to which arrays of two runs count as equal.
SAME = 1e-3


@dataclass(frozen=True)
class Checkpoint:
    """Predictions of the finished folds of one calibration.

    Attributes:
        folder: The folder of the files.
    """

    folder: Path

    @classmethod
    def open(cls, folder: str | Path, facts: Mapping[str, str]) -> "Checkpoint":
        """Start a checkpoint, or continue the checkpoint of the same calibration.

        Args:
            folder: The folder; it is created if it does not exist.
            facts: Names and identifiers of the data, the folds and the settings of the calibration.

        Raises:
            ValueError: The folder belongs to a calibration with other data, folds or settings.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        manifest = place / MANIFEST
        if not manifest.exists():
            orphans = [path.name for path in place.glob("fold-*.geoq")]
            if orphans:
                raise ValueError(
                    f"checkpoint={str(place)!r} contains {orphans[0]} but not {MANIFEST}, so its calibration is unknown; "
                    "use an empty folder."
                )
            archive.write(manifest, dict(facts), {})
        stored, _ = archive.read(manifest)
        differences = [
            f"{name} was {stored.get(name)}, now {facts.get(name)}"
            for name in {**stored, **facts}
            if stored.get(name) != facts.get(name)
        ]
        if differences:
            raise ValueError(
                f"checkpoint={str(place)!r} belongs to another calibration ({'; '.join(differences)}); "
                "use another folder, or delete this folder."
            )
        return cls(place)

    def jobs(self, proposed: list[list[int]]) -> list[list[int]]:
        """The folds that are trained together: the proposed lists in the first run, and the same lists in later runs."""
        file = self.folder / JOBS
        if not file.exists():
            archive.write(file, {"jobs": proposed}, {})
        jobs: list[list[int]] = archive.read(file)[0]["jobs"]
        return jobs

    def first(self, name: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arrays of the first run, which later runs must reproduce up to rounding.

        A surrogate that is trained again differs in its last digits, and so does everything that depends on it.

        Raises:
            ValueError: the arrays differ from the first run by more than rounding.
        """
        file = self.folder / f"{name}.geoq"
        if not file.exists():
            archive.write(file, {}, arrays)
        known = archive.read(file)[1]
        for part, array in arrays.items():
            same = torch.allclose(
                known[part].double(), array.cpu().double(), rtol=SAME, atol=SAME
            )
            if not same:
                raise ValueError(
                    f"checkpoint={str(self.folder)!r} belongs to another calibration (the {part} of the {name} differs); use "
                    "another folder, or delete this one. If fit trains the deployed surrogate, the training must be "
                    "reproducible."
                )
        return known

    def has(self, fold: int) -> bool:
        """Whether the fold is finished."""
        return self._file(fold).exists()

    def load(self, fold: int) -> Float[Tensor, " n *output"]:
        """The predictions of the surrogate of the fold."""
        try:
            return archive.read(self._file(fold))[1]["prediction"]
        except ValueError as exc:
            exc.add_note(f"Delete {self._file(fold)} to train this fold again.")
            raise

    def save(self, fold: int, prediction: Float[Tensor, " n *output"]) -> None:
        """Store the predictions of a finished fold."""
        archive.write(self._file(fold), {"fold": fold}, {"prediction": prediction})

    def _file(self, fold: int) -> Path:
        return self.folder / f"fold-{fold + 1:04d}.geoq"


def array_id(array: Array) -> str:
    """An identifier of an array: dtype, shape and a hash of its values."""
    values = array
    if not isinstance(array, np.ndarray):
        values = to_tensor(array, "array").detach().cpu().numpy()
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return f"{values.dtype} {values.shape} {digest[:16]}"


def object_id(thing: object) -> str:
    """An identifier of an object that is the same in another process; a plain function is identified by its name alone."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def folds_id(plan: FoldPlan) -> str:
    """An identifier of the folds: their scheme, and a hash of their training and held-out rows."""
    digest = hashlib.sha256(json.dumps([len(plan.splits)]).encode())
    for rows in plan.splits:
        for part in rows:
            digest.update(array_id(np.asarray(part, dtype=np.int64)).encode())
    return f"{object_id(plan)} with rows {digest.hexdigest()[:16]}"
