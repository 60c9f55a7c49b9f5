"""What scripts/frozen.py recorded is what is computed now."""

import pytest

from tests import forks

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.mark.parametrize(
    ("only", "records"), [("streamed,encoder_classify", 2), ("checkpoints", 2)]
)
def test_nothing_that_is_frozen_has_changed(only, records):
    done = forks.run("scripts/frozen.py", f"--only={only}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{records} records compared, 0 differ" in done.stdout


def test_an_unknown_part_is_refused_by_its_flag():
    done = forks.run("scripts/frozen.py", "--only=checkpoint")
    assert done.returncode == 2 and "Did you mean checkpoints" in done.stderr
    assert "(--only)" in done.stderr
