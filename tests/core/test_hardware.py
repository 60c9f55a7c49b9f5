import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import (
    CARDS,
    DeviceCard,
    find_card,
    parse_cluster,
    parse_mixed,
    shared,
)
from pallas_kernels.hopper.cards import CHIPS


def test_cards_are_found_by_jaxs_names():
    assert find_card("NVIDIA H100 80GB HBM3") is CARDS["H100"]
    assert find_card("NVIDIA H200") is CARDS["H200"]
    assert find_card("NVIDIA A100-SXM4-80GB") is CARDS["A100"]
    assert find_card("cpu") is None
    for kind, name in [
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ]:
        assert find_card(kind) is CARDS[name]
    assert find_card("NVIDIA A10G") is None
    assert find_card("Tesla T4", "bfloat16") is None and find_card("NVIDIA L4", "bfloat16")


def test_a_type_that_a_device_has_not():
    """Volta has no bfloat16: the roofline says so instead of failing on a missing key."""
    with pytest.raises(UserError, match="V100 does not compute in bfloat16, only float32, float16"):
        CARDS["V100"].floor_s(1.0, 1.0)
    assert CARDS["V100"].floor_s(125e12, 1.0, "float16") == 1.0


def test_tensor_cores_follow_from_the_chip():
    """Dense FLOPs of an SM and clock, by generation (white papers): a check of the datasheets.

    float16 with float32 sums; of V100 1024, Turing 1024, GA102 512 and Ada 1024 in float16, which
    its inference cards have in full. Datasheets round the clock, A10 has the full 1024.
    """
    for name, each in [("V100", 1024), ("T4", 1024), ("A10", 1024), ("L4", 1024), ("L40S", 1024)]:
        card = CARDS[name]
        assert card.flops["float16"] == pytest.approx(card.sms * each * card.clock_hz, rel=0.05)
    for name, each in [("V100", 128), ("P100", 128), ("T4", 128), ("A10", 256), ("L40S", 256)]:
        card = CARDS[name]
        assert card.flops["float32"] == pytest.approx(card.sms * each * card.clock_hz, rel=0.05)


def test_a_cluster_of_several_kinds():
    cluster = parse_mixed("t4:3,V100:1")
    assert [card.name for card in cluster.cards] == ["T4", "T4", "T4", "V100"]
    assert cluster.name == "t4:3,v100:1" and cluster.devices == 4


@pytest.mark.parametrize("text", ["t4", "t4:0", "t4:3;v100:1", "t5:1", "t4:1,"])
def test_a_mixed_cluster_that_cannot_be_read_is_explained(text):
    with pytest.raises(UserError, match="--cluster"):
        parse_mixed(text)


@pytest.mark.parametrize("kind", ["NVIDIA GH200 480GB", "NVIDIA GH200 96GB HBM3", "NVIDIA GB200"])
def test_a_card_is_found_by_its_whole_name(kind):
    """A GH200 with 96 GB took the H200's card of 141."""
    assert find_card(kind) is None


def test_a100_peak_is_the_one_that_megascale_divides_by():
    assert CARDS["A100"].flops["bfloat16"] == 312e12


def test_clusters_are_written_as_kind_hosts_gpus():
    cluster = parse_cluster("h100:1536x8")
    assert cluster.card is CARDS["H100"] and cluster.devices == 12288
    assert cluster.name == "h100:1536x8" and cluster.hosts_per_pod == 64
    assert cluster.inside.bytes_per_s == 450e9 and cluster.between.bytes_per_s == 50e9


@pytest.mark.parametrize("text", ["h100", "h100:8", "h100:0x8", "h101:1x8", "h100:1x8x2"])
def test_a_cluster_that_cannot_be_read_is_explained(text):
    with pytest.raises(UserError, match="--cluster"):
        parse_cluster(text)


def test_gpus_share_the_adapters_of_their_host():
    assert shared(CARDS["A100"], "Slingshot-10", 1, 4).network_bytes_per_s == 100e9 / 8 / 4
    assert shared(CARDS["H800"], "InfiniBand NDR", 8, 8) == CARDS["H800"]


def test_cards_agree_with_the_chips_that_kernels_are_compiled_for():
    """SMs, L2 and clock of every card, as XLA's GPU compiler is told."""
    for name in CHIPS:
        card = CARDS[name.upper()]
        _, _, sms, _, _, l2, clock, *_ = CHIPS[name.lower()]
        assert (card.sms, card.l2_bytes, card.clock_hz) == (sms, l2, clock * 1e9), name


def test_a_card_may_leave_its_chip_unknown():
    card = DeviceCard("T", {"float32": 1e12}, 1, 1e11, 1e9, 1e9)
    assert (card.sms, card.l2_bytes, card.clock_hz) == (0, 0, 0)
