"""Checkpoints: a folder with the predictions of every finished fold, from which an interrupted calibration continues.

The files contain arrays and numbers, and no code. Each file is written completely or not at all, and contains an identifier of
the calibration that it belongs to.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from geoq import archive
from geoq.checks import add_note_on_error, warn
from geoq.fold_plan import FoldPlan
from geoq.training.recipe_id import Unrecognisable, array_id, object_id, recipe_id

MANIFEST = "calibration.geoq"
JOBS = "jobs.geoq"

# Relative difference up to which arrays of two runs count as equal.
SAME = 1e-3


@dataclass(frozen=True)
class Checkpoint:
    """A folder that keeps the finished folds of a calibration; pass it to ``fit`` as ``checkpoint``.

    The folder alone is sufficient in most cases. A later run must have the same data, folds and settings, and the same recipe
    and representation. These are recognised by their code and values, unless ``key`` is given.

    Attributes:
        folder: The folder; it is created if it does not exist.
        key: Your name for the recipe and the representation. A later run then compares this name instead of code and values.

    Example:
        >>> from geoq.training import Checkpoint
        >>> checkpoint = Checkpoint("calibration", key="ridge, alpha=0.1")
        >>> geoq.fit(x, y, checkpoint=checkpoint)  # doctest: +SKIP
    """

    folder: str | Path
    key: str | None = None

    @staticmethod
    def of(place: "str | Path | Checkpoint") -> "Checkpoint":
        """The checkpoint in a folder, or a given one."""
        if isinstance(place, Checkpoint):
            return place
        if not isinstance(place, str | Path):
            raise TypeError(
                f"checkpoint={place!r}: checkpoint must be the path of a folder or a Checkpoint; pass for example "
                "checkpoint='calibration'."
            )
        return Checkpoint(place)

    def open(
        self, facts: Mapping[str, str], callables: Mapping[str, object]
    ) -> "FinishedFolds":
        """Start a checkpoint, or continue the checkpoint of the same calibration.

        The checkpoint of another calibration is refused: its data, folds and settings, which ``facts`` identifies, or its recipe
        and representation differ.
        """
        own = dict(facts) | {name: self._id(name, of) for name, of in callables.items()}
        place = Path(self.folder)
        place.mkdir(parents=True, exist_ok=True)
        manifest = place / MANIFEST
        if not manifest.exists():
            orphans = [path.name for path in place.glob("fold-*.geoq")]
            if orphans:
                raise ValueError(
                    f"checkpoint={str(place)!r} contains {orphans[0]} but not {MANIFEST}, so its calibration is unknown; "
                    "use an empty folder."
                )
            archive.write(manifest, own, {})
        with add_note_on_error("Delete the folder to start again."):
            stored, _ = archive.read(manifest)
        self._check(stored, own, callables)
        return FinishedFolds(place, _hash(own))

    def _id(self, name: str, of: object) -> str:
        if self.key is not None:
            return f"key {self.key!r}"
        try:
            return recipe_id(of)
        except Unrecognisable as exc:
            raise ValueError(
                f"checkpoint={str(self.folder)!r}, but {name} contains {exc}, which a later run cannot recognise; give the "
                f"recipe a name of your own, checkpoint=Checkpoint({str(self.folder)!r}, key='name'), from geoq.training."
            ) from exc

    def _check(
        self,
        stored: Mapping[str, Any],
        own: Mapping[str, str],
        callables: Mapping[str, object],
    ) -> None:
        different = [n for n in {**stored, **own} if stored.get(n) != own.get(n)]
        if not different:
            return
        listed = "; ".join(
            f"{name} was {stored.get(name)}, now {own.get(name)}" for name in different
        )
        named = (
            " If the code and values are the same, name them with Checkpoint(folder, key='name')."
            if self.key is None and set(different) <= set(callables)
            else ""
        )
        raise ValueError(
            f"checkpoint={str(self.folder)!r} belongs to another calibration ({listed}); use another folder, or delete this "
            f"folder.{named}"
        )


@dataclass(frozen=True)
class FinishedFolds:
    """Predictions of the finished folds of one calibration.

    A file that cannot be written, for example on a full disk, gives a warning. The calibration then continues in memory.

    Attributes:
        folder: The folder of the files.
        calibration: The identifier of the calibration, which every file contains.
    """

    folder: Path
    calibration: str

    def jobs(self, proposed: list[list[int]]) -> list[list[int]]:
        """The folds that are trained together: the proposed lists in the first run, and the same lists in later runs."""
        file = self.folder / JOBS
        if not file.exists():
            self._write(file, {"jobs": proposed}, {})
        if not file.exists():
            return proposed
        jobs: Any = self._read(file)[0].get("jobs")
        needed = sorted(fold for job in proposed for fold in job)
        try:
            listed = sorted(fold for job in jobs for fold in job)
        except TypeError:
            listed = []
        if listed != needed:
            raise ValueError(
                f"{file} lists the folds {listed}, but the calibration needs each of {needed} once; delete the folder to start "
                "again."
            )
        return [[int(fold) for fold in job] for job in jobs]

    def first(self, name: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arrays of the first run, which later runs must reproduce up to rounding.

        A surrogate that is trained again differs in its last digits, and so does everything that depends on it.
        """
        file = self.folder / f"{name}.geoq"
        if not file.exists():
            self._write(file, {}, arrays)
        if not file.exists():
            return dict(arrays)
        known = self._read(file)[1]
        for part, array in arrays.items():
            same = part in known and torch.allclose(
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

    def load(self, fold: int, n_rows: int) -> Float[Tensor, " n *output"]:
        """The predictions of the surrogate of the fold at this number of rows."""
        file = self._file(fold)
        numbers, arrays = self._read(file)
        prediction = arrays.get("prediction")
        if (
            numbers.get("fold") != fold
            or prediction is None
            or len(prediction) != n_rows
        ):
            raise ValueError(
                f"{file} does not contain the {n_rows} predictions of fold {fold + 1}; delete it to train this fold again."
            )
        return prediction

    def save(self, fold: int, prediction: Float[Tensor, " n *output"]) -> None:
        """Store the predictions of a finished fold."""
        self._write(self._file(fold), {"fold": fold}, {"prediction": prediction})

    def _file(self, fold: int) -> Path:
        return self.folder / f"fold-{fold + 1:04d}.geoq"

    def _read(self, file: Path) -> archive.Content:
        with add_note_on_error(f"Delete {file} to compute its content again."):
            numbers, arrays = archive.read(file)
            if numbers.get("calibration") != self.calibration:
                raise ValueError(f"{file} belongs to another calibration.")
        return numbers, arrays

    def _write(
        self, file: Path, numbers: dict[str, Any], arrays: Mapping[str, Tensor]
    ) -> None:
        try:
            archive.write(file, {"calibration": self.calibration, **numbers}, arrays)
        except OSError as exc:
            warn(
                f"checkpoint={str(self.folder)!r} cannot be written ({exc.strerror or exc}); fit continues, but an interrupted run "
                "will train this fold again."
            )


def _hash(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def folds_id(plan: FoldPlan) -> str:
    """An identifier of the folds: their scheme, and a hash of their training and held-out rows."""
    digest = hashlib.sha256(json.dumps([len(plan.splits)]).encode())
    for rows in plan.splits:
        for part in rows:
            digest.update(array_id(np.asarray(part, dtype=np.int64)).encode())
    return f"{object_id(plan)} with rows {digest.hexdigest()[:16]}"
