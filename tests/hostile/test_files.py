"""Files that are damaged, forged, linked, locked or replaced: each attack ends in a refusal or in the right answer."""

import copy
import json
import os
import pickle
import stat
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import tables
from benchmarks.hostile import mutations
from benchmarks.hostile.cases import CASES, linear, step
from geoq import GeoQ, RolloutGeoQ, archive
from geoq.sklearn import GeoQRegressor

DEFAULT, PAPER = CASES[0], CASES[1]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def file(tmp_path):
    DEFAULT.fitted.save(tmp_path / "a.geoq")
    return tmp_path / "a.geoq"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_is_refused_or_changes_nothing(case, tmp_path):
    rng = np.random.default_rng(0)
    counts = mutations.count_damage([case], 12, tmp_path, rng)[case.name]
    assert set(counts) <= {"refused", "same"}
    assert counts["refused"] > 6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forged_files_are_refused_clearly_or_answered(case, tmp_path):
    """The checksum is right, and plausible values give other answers: a checksum is not a signature."""
    rng = np.random.default_rng(0)
    counts = mutations.count_forged([case], 8, tmp_path, rng)[case.name]
    assert set(counts) <= {"refused", "same", "wrong"}


def forge(path, change):
    numbers, arrays = archive.read(path)
    change(numbers, arrays)
    archive.write(path, numbers, arrays)


def setting(*place):
    *parents, key, value = place

    def change(numbers, _):
        for parent in parents:
            numbers = numbers[parent]
        numbers[key] = value

    return change


def array(name, of):
    def change(_, arrays):
        arrays[name] = of(arrays[name])

    return change


LABELS = ("xarray", "labels", "dtype", "V100000000")
FORGED = [
    ("default", array("error", lambda e: -e), "'error' is negative or infinite"),
    ("default", array("calibration.fold", lambda fold: fold[1:]), "not of length"),
    ("default", array("points.z", lambda z: z / 0), "'points.z' is not finite"),
    ("default", array("calibration.point", lambda p: p + 9**9), "out of range"),
    (
        "default",
        setting("safe_region", "threshold", float("inf")),
        "threshold=inf is no",
    ),
    ("default", setting("n_anchors", 10**9), "n_anchors is larger than the data"),
    ("default", setting("n_support", "x"), "n_support='x'"),
    (
        "default",
        setting("conformal_factors", [-1.0, 1.0]),
        "conformal_factors=-1.0 is no",
    ),
    ("default", setting("safe_region", None), "TypeError"),
    ("default", lambda numbers, _: numbers.clear(), "KeyError"),
    ("paper", setting("increment_settings", "hidden", [10**6] * 2), "size mismatch"),
    ("paper", setting("increment_settings", "quantile", 7), "quantile=7"),
    ("two values", setting("increment_settings", "n_networks", 10**9), "KeyError"),
    ("field network", setting("increment_settings", "widths", [10**5] * 2), "mismatch"),
    (
        "RolloutGeoQ, paper",
        setting("scheme_settings", "hidden", [10**6] * 2),
        "mismatch",
    ),
    ("RolloutGeoQ", setting("safe_region", "threshold", float("nan")), "threshold=nan"),
    (
        "RolloutGeoQ",
        array("held_out.error", lambda e: -e),
        "'held_out.error' is negative",
    ),
    ("RolloutGeoQ", setting("state_shape", [10**6]), "forcing_shape is not possible"),
    ("RolloutGeoQ", setting("forcing_shape", [2]), "forcing_shape is not possible"),
    ("XarrayGeoQ", setting(*LABELS), "not a dtype of labels"),
    ("XarrayGeoQ", setting("xarray", "y", "shape", [10**6] * 2), "not without samples"),
    ("GeoQRegressor", setting("sklearn", "n_features_in", -1), "n_features_in=-1"),
]


@pytest.mark.parametrize(("name", "change", "message"), FORGED)
def test_values_that_no_calibration_has_are_refused(tmp_path, name, change, message):
    path = tmp_path / "a.geoq"
    BY_NAME[name].fitted.save(path)
    forge(path, change)
    with pytest.raises(ValueError, match="is not a complete file of a") as refused:
        BY_NAME[name].load(path)
    assert message in str(refused.value)


def test_a_declared_width_of_strings_is_not_allocated(tmp_path):
    path = tmp_path / "a.geoq"
    case = BY_NAME["XarrayGeoQ"]
    case.fitted.save(path)
    place = ("xarray", "x", "coords", "place", "dtype", "U100000000")
    forge(path, setting(*place))
    assert case.load(path).x_["place"].dtype.itemsize < 100


@pytest.mark.parametrize(
    ("load", "argument"),
    [
        (GeoQ.load, "surrogate"),
        (GeoQRegressor.load, "estimator"),
        (RolloutGeoQ.load, "surrogate"),
    ],
)
def test_a_missing_model_is_named(tmp_path, load, argument):
    case = {RolloutGeoQ.load: "RolloutGeoQ", GeoQRegressor.load: "GeoQRegressor"}
    BY_NAME[case.get(load, "default")].fitted.save(tmp_path / "a.geoq")
    with pytest.raises(ValueError, match=f"{argument}=None, but .* contains no model"):
        load(tmp_path / "a.geoq", **{argument: None})


@pytest.mark.parametrize(
    "surrogate", [lambda s: s * np.nan, lambda s: step(s) + np.r_[np.nan, 0]]
)
def test_a_rollout_surrogate_that_returns_nan_at_a_stored_state_is_refused(
    tmp_path, surrogate
):
    BY_NAME["RolloutGeoQ"].fitted.save(tmp_path / "a.geoq")
    with pytest.raises(ValueError, match="surrogate"):
        RolloutGeoQ.load(tmp_path / "a.geoq", surrogate=surrogate)


@pytest.mark.parametrize("attack", ["truncate", "overwrite", "delete"])
def test_a_loaded_estimator_does_not_depend_on_its_file(file, attack):
    loaded, expected = DEFAULT.load(file), DEFAULT.answers(DEFAULT.fitted)
    if attack == "truncate":
        os.truncate(file, 10)
    elif attack == "overwrite":
        with file.open("rb+") as stream:
            stream.seek(len(file.read_bytes()) // 2)
            stream.write(b"\xff" * 4000)
    else:
        file.unlink()
    assert mutations.same(DEFAULT.answers(loaded), expected)


def test_a_link_stays_and_its_target_is_replaced(file, tmp_path):
    link = tmp_path / "link.geoq"
    link.symlink_to(file)
    PAPER.fitted.save(link)
    assert link.is_symlink()
    assert mutations.same(PAPER.answers(PAPER.load(file)), PAPER.answers(PAPER.fitted))


@pytest.mark.parametrize("kind", ["device", "folder", "loop", "pipe"])
def test_what_is_not_a_file_is_never_replaced(tmp_path, kind):
    path = tmp_path / kind
    if kind == "device":
        path = Path("/dev/full")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        os.mkfifo(path)
    before = os.lstat(path).st_mode
    with pytest.raises(ValueError, match="not a file; choose the path of a file"):
        archive.write(path, {}, {})
    assert os.lstat(path).st_mode == before
    with pytest.raises((FileNotFoundError, OSError)):
        archive.read(path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        archive.write(tmp_path / "a", {}, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_only_leftovers_of_ended_processes_are_removed(tmp_path):
    names = [f".a.{digit * 32}.tmp" for digit in "0f"]
    foreign = [".a.tmp", f".b.{'0' * 32}.tmp", f".a.{'g' * 32}.tmp", ".a.123.tmp"]
    for name in names + foreign:
        (tmp_path / name).write_bytes(b"x")
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / names[1]).open("rb+") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        archive.write(tmp_path / "a", {}, {})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a", names[1], *foreign}


def test_threads_that_save_to_one_path_do_not_disturb_each_other(tmp_path):
    failures = []

    def save(number):
        try:
            for _ in range(20):
                archive.write(tmp_path / "a", {"n": number}, {"t": torch.ones(50)})
                archive.read(tmp_path / "a")
        except (OSError, ValueError) as exc:
            failures.append(exc)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def header_of(entries, data=b""):
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + data


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 40,
        header_of([]),
        header_of({"a": entry([2**60], 0, 4)}, bytes(4)),
        header_of({"a": entry([0, 2**62, 2**62], 0, 0)}),
        header_of({"a": entry([-1, -1], 0, 4)}, bytes(4)),
        header_of({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(8)),
        header_of({"a": entry([1], 4, 8)}, bytes(8)),
        header_of({"a": entry([1.0], 0, 4)}, bytes(4)),
        header_of({"a": entry([1], 0, 4, "X9")}, bytes(4)),
        header_of({"a": None}),
        header_of({"__metadata__": {"format": 3}}),
        header_of({"__metadata__": "geoq 2"}),
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
    ],
)
def test_impossible_headers_are_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not a geoq file"):
        archive.read(tmp_path / "a")


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path):
    size = 2**32
    with (tmp_path / "a").open("wb") as file:
        file.write(header_of({"a": entry([size // 4], 0, size)}))
        file.truncate(file.tell() + size)
    with pytest.raises(ValueError, match="bytes were written"):
        archive.read(tmp_path / "a")


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
)
DTYPES += (torch.int16, torch.int8, torch.uint8, torch.bool)


def test_the_format_is_safetensors(tmp_path):
    arrays = {str(dtype): torch.arange(7).to(dtype).reshape(7, 1) for dtype in DTYPES}
    arrays |= {"none": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    archive.write(tmp_path / "ours", {}, arrays)
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert {*file.keys()} == {*arrays}
        assert all(torch.equal(file.get_tensor(n), arrays[n]) for n in arrays)
        metadata = file.metadata()
    save_file(arrays, tmp_path / "theirs", metadata=metadata)
    read = archive.read(tmp_path / "theirs")[1]
    assert all(torch.equal(read[name], arrays[name]) for name in arrays)


class Interrupted(KeyboardInterrupt):
    pass


def interrupted(*_args):
    raise Interrupted


class Files(RuleBasedStateMachine):
    """Save, load, copy, damage and interrupt in any order: every estimator keeps its answers, every file is whole or refused."""

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "a.geoq"
        self.estimators = [DEFAULT.fitted]
        self.is_whole = False
        self.rng = np.random.default_rng(0)

    @rule(which=st.integers(0, 9))
    def save(self, which):
        self.estimators[which % len(self.estimators)].save(self.path)
        self.is_whole = True

    @rule()
    def interrupt(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.fsync", interrupted)
            with pytest.raises(Interrupted):
                self.estimators[-1].save(self.path)

    @rule()
    def damage(self):
        if self.path.exists():
            content = self.path.read_bytes()
            self.path.write_bytes(mutations.damaged(content, content, self.rng)[0])
            self.is_whole = False

    @rule()
    def load(self):
        if not self.path.exists():
            return
        try:
            self.estimators.append(DEFAULT.load(self.path))
        except ValueError:
            assert not self.is_whole

    @rule(
        make=st.sampled_from(
            [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
        )
    )
    def copy(self, make):
        self.estimators.append(make(self.estimators[-1]))

    @invariant()
    def answers_are_unchanged(self):
        answers = DEFAULT.answers(self.estimators[-1])
        assert mutations.same(answers, DEFAULT.expected)

    @invariant()
    def nothing_is_left_behind(self):
        assert {*Path(self.folder.name).iterdir()} <= {self.path}

    def teardown(self):
        self.folder.cleanup()


Files.TestCase.settings = settings(
    max_examples=5,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestFiles = Files.TestCase


def test_the_long_run_found_no_silent_wrong_answer():
    rows = tables.load("hostile")["rows"]
    attacks = [row for row in rows if row["attack"] != "forged files"]
    assert len(attacks) > 10
    assert sum(row.get("wrong", 0) for row in attacks) == 0
    assert sum(row.get("leftovers", 0) for row in attacks) == 0


def test_a_surrogate_of_a_file_is_compared(file):
    with pytest.raises(ValueError, match="surrogate is not the one"):
        GeoQ.load(file, surrogate=lambda x: 2 * linear(x))
