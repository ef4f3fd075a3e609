import pytest

from geoq.cli import main


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("missing/demo.png", "the folder {}/missing does not exist"),
        ("demo.txt", "demo.txt is not the name of a picture"),
        ("", "is not the name of a picture"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_training(
    picture, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "sys.argv", ["geoq", "demo", "--picture", f"{tmp_path}/{picture}"]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    printed = capsys.readouterr()
    assert message.format(tmp_path) in " ".join(printed.err.split())
    assert "Training" not in printed.out
