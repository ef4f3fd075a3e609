"""A folder that keeps the predictions of every finished fold, so that an interrupted calibration can continue.

Files hold arrays and numbers, never code, and are written completely or not at all.
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

from geoq import archive
from geoq.arrays import Array, to_tensor
from geoq.folds import FoldPlan

MANIFEST = "calibration.geoq"
JOBS = "jobs.geoq"


@dataclass(frozen=True)
class Checkpoint:
    """Predictions of the finished folds of one calibration."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path, facts: Mapping[str, str]) -> "Checkpoint":
        """Start or continue the checkpoint of the calibration that these facts describe.

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
                    f"{place} holds {stray[0]} but no {MANIFEST}, so its calibration is unknown; use an empty folder."
                )
            archive.write(manifest, dict(facts), {})
        known, _ = archive.read(manifest)
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

    def jobs(self, proposed: list[list[int]]) -> list[list[int]]:
        """Which folds are trained together: as proposed in the first run, and the same in later runs."""
        file = self.folder / JOBS
        if not file.exists():
            archive.write(file, {"jobs": proposed}, {})
        jobs: list[list[int]] = archive.read(file)[0]["jobs"]
        return jobs

    def bind(self, name: str, fact: str) -> None:
        """Refuse to continue if a fact that is known only after the first training differs from the first run."""
        file = self.folder / f"{name}.geoq"
        if not file.exists():
            archive.write(file, {name: fact}, {})
        known = archive.read(file)[0][name]
        if known != fact:
            raise ValueError(
                f"{self.folder} is the checkpoint of another calibration: {name} was {known}, now {fact}; use another folder, "
                "or delete this one. If the deployed surrogate is trained by fit, its training must be reproducible."
            )

    def has(self, fold: int) -> bool:
        """Whether the fold is finished."""
        return self._file(fold).exists()

    def load(self, fold: int) -> Float[Tensor, " n *output"]:
        """The predictions of the surrogate of the fold."""
        try:
            return archive.read(self._file(fold))[1]["prediction"]
        except ValueError as exc:
            exc.add_note(f"delete {self._file(fold)}; the fold is then trained again")
            raise

    def save(self, fold: int, prediction: Float[Tensor, " n *output"]) -> None:
        """Store the predictions of a finished fold."""
        archive.write(self._file(fold), {"fold": fold}, {"prediction": prediction})

    def _file(self, fold: int) -> Path:
        return self.folder / f"fold-{fold + 1:04d}.geoq"


def of_array(array: Array) -> str:
    """An identifier of an array: dtype, shape and a hash of its values."""
    values = array
    if not isinstance(array, np.ndarray):
        values = to_tensor(array, "array").detach().cpu().numpy()
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return f"{values.dtype} {values.shape} {digest[:16]}"


def of_object(thing: object) -> str:
    """An identifier of an object that is the same in another process; a plain function is identified by its name alone."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def of_folds(plan: FoldPlan) -> str:
    """An identifier of the folds: their scheme, and a hash of their training and held-out rows."""
    digest = hashlib.sha256(json.dumps([len(plan.splits)]).encode())
    for rows in plan.splits:
        for part in rows:
            digest.update(of_array(np.asarray(part, dtype=np.int64)).encode())
    return f"{of_object(plan)} with rows {digest.hexdigest()[:16]}"
