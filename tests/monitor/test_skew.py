from unittest import mock

from megajax.monitor import timers
from megajax.monitor.timers import LaunchSkew


class Store:
    """The three calls of jax.distributed's key-value store that are used."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert key not in self.values or allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(k, v) for k, v in self.values.items() if k.startswith(folder)]

    def key_value_delete(self, folder):
        for key in [k for k in self.values if k.startswith(folder)]:
            del self.values[key]


def test_skew_is_last_minus_first_of_one_step():
    store = Store()
    hosts = [LaunchSkew(store, i) for i in range(3)]
    moments = {1: (100.0, 100.25, 99.5), 11: (200.0, 200.0, 203.0)}
    for step, times in moments.items():
        for host, now in zip(hosts, times, strict=True):
            with mock.patch.object(timers.time, "time", return_value=now):
                host.launch(step)
    assert hosts[1].finish(1) == {} and hosts[0].finish(1) == {"launch_skew_s": 0.75}
    assert hosts[0].finish(11) == {"launch_skew_s": 3.0}
    assert not store.values


def test_a_step_that_was_launched_and_never_finished_is_launched_again():
    """As in a second training of the same job, after the first ended by an error."""
    store = Store()
    for times in ((100.0, 170.0), (200.0, 201.5)):
        hosts = [LaunchSkew(store, i) for i in range(2)]
        for host, now in zip(hosts, times, strict=True):
            with mock.patch.object(timers.time, "time", return_value=now):
                host.launch(7)
    assert hosts[0].finish(7) == {"launch_skew_s": 1.5}


def test_a_process_alone_measures_nothing():
    alone = LaunchSkew.of_job()
    alone.launch(1)
    assert alone.finish(1) == {}
