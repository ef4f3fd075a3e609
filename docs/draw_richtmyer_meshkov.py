"""Draw richtmyer-meshkov.gif: truth, prediction and the probability of a wrong cell over time, for an operator that fits a CPU.

python -m docs.draw_richtmyer_meshkov
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.richtmyer_meshkov.pictures import SHOWN, Fields, animate
from benchmarks.richtmyer_meshkov.run import PROBLEM, measure, read_data
from benchmarks.richtmyer_meshkov.study import COARSE, smaller
from geoq import Training

HERE = Path(__file__).parent
OPERATOR = smaller(16, 10, 2, 32, (64, 128), n_epochs=60, learning_rate=5e-3)
TRAINING = Training(n_steps=400, batch_size=4, check_every=100, patience=3, n_decays=2)
# Half of the simulations of the smaller version of the benchmark, a test set, three folds and no ensemble.
SETTINGS = replace(
    COARSE,
    n_simulations=100,
    n_clusters=4,
    test_fraction=(0.1, 0.4),
    n_members=1,
    operator=OPERATOR,
    training=TRAINING,
)


def main(work: Path = HERE.parent / "build" / "richtmyer_meshkov_picture") -> None:
    """Simulate, train, calibrate and draw the test case with the median error; ten minutes on an idle core."""
    read = partial(read_data, None, work, SETTINGS, "cpu")
    where = {"settings": SETTINGS, "read": read, "work": work, "device": "cpu"}
    measure(PROBLEM, 0, [f"binary: {SHOWN[0]}"], **where)
    animate(HERE / "richtmyer-meshkov.gif", Fields(work / "fields-0.npz"), SHOWN[0])


if __name__ == "__main__":
    main()
