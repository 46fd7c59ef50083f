"""Files that are no configuration, and values in place of "auto"."""

import pytest

from zerofn.interop.deepspeed_file import filled, read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("", "is no JSON"),
        ("[1]", r"expected a JSON object, \{...\}, got a list"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice in one block"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' is there twice"),
    ],
)
def test_files_that_are_none(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file '.*missing.json'"):
        read(tmp_path / "missing.json")
    with pytest.raises(TypeError, match="the path of a JSON file or a dict, got int"):
        read(3)


def test_auto_is_filled_by_key_or_last_word():
    params = {"lr": "auto", "eps": "auto"}
    given = {"optimizer": {"type": "Adam", "params": params}, "train_batch_size": "auto", "steps_per_print": "auto"}
    found = filled(given, {"lr": 1e-3, "optimizer.params.eps": 1e-6})
    assert found == {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-6}}}
    with pytest.raises(ValueError, match='nobody says what for: pass auto={"optimizer.params.eps": ...}'):
        filled(given, {"lr": 1e-3})


def test_values_that_nobody_reads_are_errors():
    with pytest.raises(ValueError, match="'lr': ...} has no effect: no key of that name"):
        filled({"train_batch_size": "auto"}, {"lr": 1e-3})
    with pytest.raises(ValueError, match="gradient_clipping is 1.0 in the configuration and 0.5 in auto="):
        filled({"gradient_clipping": 1.0}, {"gradient_clipping": 0.5})
