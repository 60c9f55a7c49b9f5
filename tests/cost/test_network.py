"""Collectives against step-by-step hand counts: who sends how many bytes over which link, when."""

import pytest

from megajax.core.hardware import parse_cluster
from megajax.cost.roofline import CALL_S, Group, collective_time, group_of

CLUSTER = parse_cluster("h100:16x8")
NVLINK, NIC = 450e9, 50e9
NEAR, FAR = 3.4e-6, 14e-6
N = 512 * 2**20


def ring(nbytes, n, bytes_per_s):
    """Plays the ring: in each of n - 1 rounds every device passes on one n-th."""
    return sum(nbytes / n / bytes_per_s for _ in range(n - 1))


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_inside_a_host(kind):
    expected = ring(N, 8, NVLINK) + 7 * NEAR + CALL_S
    assert collective_time(kind, N, Group(8, 1), CLUSTER) == pytest.approx(expected)


def test_one_device_of_each_host():
    expected = ring(N, 16, NIC) + 4 * FAR + CALL_S  # log2 16 messages
    assert collective_time("all-gather", N, Group(1, 16), CLUSTER) == pytest.approx(expected)


def test_two_levels_use_every_nic_of_a_host():
    """Each of 8 members brings its eighth from 16 hosts, then the eighths travel over NVLink."""
    between = ring(N / 8, 16, NIC) + 4 * FAR
    inside = ring(N, 8, NVLINK) + 7 * NEAR
    expected = between + inside + CALL_S
    assert collective_time("all-gather", N, Group(8, 16), CLUSTER) == pytest.approx(expected)


def test_an_all_reduce_is_a_scatter_and_a_gather():
    expected = 2 * (ring(N, 4, NVLINK) + 3 * NEAR) + CALL_S
    assert collective_time("all-reduce", N, Group(4, 1), CLUSTER) == pytest.approx(expected)


def test_all_to_all_sends_a_block_to_every_peer():
    near = 7 * (N / 8) / NVLINK + NEAR + CALL_S
    assert collective_time("all-to-all", N, Group(8, 1), CLUSTER) == pytest.approx(near)
    # 128 blocks: 7 stay in the host, 120 leave through the device's own NIC at the same time.
    far = 120 * (N / 128) / NIC + FAR + CALL_S
    assert collective_time("all-to-all", N, Group(8, 16), CLUSTER) == pytest.approx(far)


def test_a_permute_is_one_message():
    near, far = (
        collective_time("collective-permute", N, g, CLUSTER) for g in (Group(2, 1), Group(1, 2))
    )
    assert near == pytest.approx(N / NVLINK + NEAR + CALL_S)
    assert far == pytest.approx(N / NIC + FAR + CALL_S)


def test_groups_are_read_from_device_numbers():
    assert group_of(range(8), 8) == Group(8, 1)
    assert group_of(range(0, 128, 8), 8) == Group(1, 16)
    assert group_of(range(32), 8) == Group(8, 4)
    assert group_of(range(0, 32, 4), 8) == Group(2, 4)


def test_alone_there_is_nothing_to_send():
    assert collective_time("all-reduce", N, Group(1, 1), CLUSTER) == 0.0
    with pytest.raises(ValueError, match="broadcast"):
        collective_time("broadcast", N, Group(8, 1), CLUSTER)
