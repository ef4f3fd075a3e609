import subprocess
import sys

import pytest

from geoq.cli import main


@pytest.mark.parametrize("picture", ["missing/demo.png", "demo.txt", ""])
def test_a_picture_that_cannot_be_written_raises_before_any_training(
    picture, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["geoq", "demo", "--picture", f"{tmp_path}/{picture}"])
    with pytest.raises(SystemExit, match="2"):
        main()
    printed = capsys.readouterr()
    assert "is not a picture in an existing folder" in printed.err
    assert "Training" not in printed.out


def test_the_demo_bounds_the_errors_of_a_network_and_draws_them(tmp_path):
    command = [sys.executable, "-m", "geoq", "demo", "--picture", f"{tmp_path}/demo.svg"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [line.split(" | ") for line in run.stdout.splitlines() if line.startswith("| ")]
    coverage = {row[0].removeprefix("| "): row[3] for row in rows[1:]}
    assert float(coverage["all"]) > 0.9
    assert float(coverage["safe"]) > 0.9
    assert "NOT safe, outside the region" in run.stdout
    assert (tmp_path / "demo.svg").stat().st_size > 10_000
