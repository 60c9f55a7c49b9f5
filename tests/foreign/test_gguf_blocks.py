"""Block formats of GGUF against two oracles: loops written from GGML's structures, and `gguf`."""

import struct
import warnings

import numpy as np
import pytest

from megajax.foreign.gguf_file import FORMATS, dequantize, take_apart

READABLE = {f.name: (number, f) for number, f in FORMATS.items() if f.read is not None}
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def half(block, at):
    return struct.unpack_from("<e", block, at)[0]


def q4(block, at, i):
    """The i-th of 32 numbers: the low halves of 16 bytes, then the high ones."""
    return block[at + i % 16] >> (4 * (i // 16)) & 15


def bit(block, at, i):
    return block[at + i // 8] >> i % 8 & 1


def six(block, j):
    """(scale, minimum) of group j of Q4_K and Q5_K: get_scale_min_k4."""
    q = block[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def q3_scale(block, g):
    """Of Q3_K's sixteen: 4 bits in 8 bytes, 2 more in the next 4."""
    low = block[96 + g % 8] >> (4 * (g // 8)) & 15
    return (low | (block[104 + g % 4] >> (2 * (g // 4)) & 3) << 4) - 32


def one(name, block, i):
    """Returns weight i of a block, in float64."""
    n, l = divmod(i, 128)  # noqa: E741  # of 256: two halves of 128
    j, part = l // 32, l % 32
    match name:
        case "F64":
            return struct.unpack("<d", block)[0]
        case "F32":
            return struct.unpack("<f", block)[0]
        case "F16":
            return half(block, 0)
        case "BF16":
            return struct.unpack("<f", b"\0\0" + block)[0]
        case "Q4_0":
            return half(block, 0) * (q4(block, 2, i) - 8)
        case "Q4_1":
            return half(block, 0) * q4(block, 4, i) + half(block, 2)
        case "Q5_0":
            return half(block, 0) * ((q4(block, 6, i) | bit(block, 2, i) << 4) - 16)
        case "Q5_1":
            return half(block, 0) * (q4(block, 8, i) | bit(block, 4, i) << 4) + half(block, 2)
        case "Q8_0":
            return half(block, 0) * struct.unpack_from("<b", block, 2 + i)[0]
        case "IQ4_NL":
            return half(block, 0) * IQ4[q4(block, 2, i)]
        case "IQ4_XS":
            g = i // 32
            low = block[4 + g // 2] >> (4 * (g % 2)) & 15
            high = struct.unpack_from("<H", block, 2)[0] >> (2 * g) & 3
            return half(block, 0) * ((low | high << 4) - 32) * IQ4[q4(block, 8 + 16 * g, i % 32)]
        case "Q2_K":
            q = block[16 + 32 * n + part] >> (2 * j) & 3
            scale = block[i // 16]
            return half(block, 80) * (scale & 15) * q - half(block, 82) * (scale >> 4)
        case "Q3_K":
            q = block[32 + 32 * n + part] >> (2 * j) & 3
            q -= 0 if block[part] >> (4 * n + j) & 1 else 4
            return half(block, 108) * q3_scale(block, i // 16) * q
        case "Q4_K" | "Q5_K":
            at = 16 if name == "Q4_K" else 48
            q = block[at + 32 * (i // 64) + part] >> (4 * (i // 32 % 2)) & 15
            if name == "Q5_K":
                q |= (block[16 + part] >> (i // 32) & 1) << 4
            scale, least = six(block, i // 32)
            return half(block, 0) * scale * q - half(block, 2) * least
        case "Q6_K":
            q = block[64 * n + 32 * (j % 2) + part] >> (4 * (j // 2)) & 15
            q |= (block[128 + 32 * n + part] >> (2 * j) & 3) << 4
            scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
            return half(block, 208) * scale * (q - 32)
    raise AssertionError(name)


# Places of the float16 numbers of a block; random bytes would often make them infinite.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "F16": (0,)}
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
HALVES |= dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,))


def blocks(name, rng, rows=3, across=5):
    """Random bytes, whose scales are numbers of about 1."""
    number, form = READABLE[name]
    raw = rng.integers(0, 256, (rows * across, form.nbytes), np.uint8)
    for at in HALVES.get(name, ()):
        raw[:, at : at + 2] = rng.standard_normal((len(raw), 1)).astype(np.float16).view(np.uint8)
    if name in ("F32", "F64", "BF16"):
        raw = rng.standard_normal(len(raw)).astype(f"<f{max(4, form.nbytes)}").view(np.uint8)
        raw = raw.reshape(rows * across, -1)[:, -form.nbytes :]
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", READABLE)
def test_weights_are_those_of_the_structures(name, seed):
    raw, form = blocks(name, np.random.default_rng(seed)), READABLE[name][1]
    out = dequantize(raw, form)
    assert out.shape == (3, 5 * form.weights) and out.dtype == np.float32
    flat = raw.reshape(-1, form.nbytes)
    expected = [one(name, block.tobytes(), i) for block in flat for i in range(form.weights)]
    expected = np.array(expected, np.float64).reshape(out.shape)
    size = np.abs(expected).max()
    assert size > 0.5 and len(np.unique(expected)) > 10
    np.testing.assert_allclose(out, expected, rtol=2e-7, atol=2e-7 * size)


@pytest.mark.parametrize("name", [n for n in READABLE if n != "F64"])
def test_weights_are_bit_for_bit_those_of_the_gguf_package(name, seed):
    import gguf
    from gguf.quants import dequantize as theirs

    number, form = READABLE[name]
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 256, (7, 6 * form.nbytes), np.uint8)  # infinite scales and NaN too
    for raw in (blocks(name, rng), wild):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = theirs(raw, gguf.GGMLQuantizationType(number))
        np.testing.assert_array_equal(dequantize(raw, form), expected)


def test_sizes_of_all_formats_are_those_of_the_gguf_package():
    import gguf

    theirs = {int(k): (k.name, *gguf.GGML_QUANT_SIZES[k]) for k in gguf.GGMLQuantizationType}
    theirs[9] = ("Q8_1", 32, 36)  # two float16 numbers there now; it is never stored
    assert {k: (f.name, f.weights, f.nbytes) for k, f in FORMATS.items()} == theirs


def test_many_rows_are_read_in_chunks(monkeypatch):
    monkeypatch.setattr("megajax.foreign.gguf_file.CHUNK", 1)
    raw, form = blocks("Q8_0", np.random.default_rng(0), rows=20, across=3), READABLE["Q8_0"][1]
    chunked = dequantize(raw, form)
    monkeypatch.undo()
    np.testing.assert_array_equal(chunked, dequantize(raw, form))


@pytest.mark.parametrize("name", [n for n, (_, f) in READABLE.items() if f.packing])
def test_codes_scales_and_zero_points_hold_the_weights(name, seed):
    raw, form = blocks(name, np.random.default_rng(seed)), READABLE[name][1]
    kind, (code, scale, zero) = form.packing, take_apart(raw, form)
    low, high = (0, 2**kind.bits) if kind.zeros else (-(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1))
    assert low <= code.min() and code.max() < high
    expected = dequantize(raw, form).astype(np.float64).reshape(3, -1, kind.group)
    got = scale[..., None].astype(np.float64) * code.reshape(expected.shape)
    got += 0 if zero is None else zero[..., None]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
    for x in (scale, zero):
        assert x is None or np.array_equal(x, x.astype(kind.scale_dtype).astype(np.float32))
