"""Flags of adapters that a server does not heed are refused."""

import types

import pytest

from megajax.core.errors import UserError
from megajax.systems.server import launch
from megajax.systems.server.options import Config


def test_an_encoder_refuses_adapters():
    opened = types.SimpleNamespace(name="ENCODER")
    with pytest.raises(UserError, match="ENCODER is an encoder.*--adapter"):
        launch.serve_encoder(Config(adapter=("style=FOLDER",)), opened)
