"""Block formats as data: names, GGUF type numbers, byte counts, level and scale tables.

NumPy only, no decoding: that is `ds4jax.quant`, whose users need not import this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

Rocmfp2Reading = Literal["s40", "fixed", "signed", "affine"]

ROCMFP2_TYPE_ID = 107


@dataclass(frozen=True, kw_only=True)
class Format:
    """One weight format. A row of n weights takes n / block * block_bytes bytes."""

    name: str
    ggml_name: str  # spelling of the GGUF producers, or of the safetensors dtype
    type_id: int | None  # GGUF type number; None: safetensors checkpoints only
    block: int  # weights
    block_bytes: int
    bits: float  # per weight, block scales included

    def row_bytes(self, weights: int) -> int:
        """Bytes of one row of `weights` weights.

        Raises:
            ValueError: if the row is no whole number of blocks.
        """
        if weights % self.block:
            raise ValueError(
                f"{self.name}: a row of {weights} weights is not a multiple of its block of"
                f" {self.block}"
            )
        return weights // self.block * self.block_bytes

    def row_weights(self, row_bytes: int) -> int:
        """Weights in a row of `row_bytes` bytes.

        Raises:
            ValueError: if the row is no whole number of blocks.
        """
        if row_bytes % self.block_bytes:
            raise ValueError(
                f"{self.name}: a row of {row_bytes} bytes is not a multiple of its block of"
                f" {self.block_bytes} bytes ({self.block} weights)"
            )
        return row_bytes // self.block_bytes * self.block


def _block_format(name: str, ggml_name: str, type_id: int, block: int, block_bytes: int) -> Format:
    return Format(
        name=name,
        ggml_name=ggml_name,
        type_id=type_id,
        block=block,
        block_bytes=block_bytes,
        bits=block_bytes * 8 / block,
    )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _block_format("f32", "F32", 0, 1, 4),
        _block_format("f16", "F16", 1, 1, 2),
        _block_format("bf16", "BF16", 30, 1, 2),
        _block_format("i32", "I32", 26, 1, 4),
        _block_format("q8_0", "Q8_0", 8, 32, 34),
        _block_format("q2_k", "Q2_K", 10, 256, 84),
        _block_format("q4_k", "Q4_K", 12, 256, 144),
        _block_format("iq2_xxs", "IQ2_XXS", 16, 256, 66),
        _block_format("mxfp4", "MXFP4", 39, 32, 17),
        _block_format("nvfp4", "NVFP4", 40, 64, 36),
        _block_format("rocmfp4", "Q4_0_ROCMFP4", 100, 32, 18),
        _block_format("rocmfp4_fast", "Q4_0_ROCMFP4_FAST", 101, 32, 17),
        _block_format("rocmfp6", "Q6_0_ROCMFPX", 102, 32, 26),
        _block_format("rocmfp8", "Q8_0_ROCMFPX", 103, 32, 33),
        _block_format("rocmfp3", "Q3_0_ROCMFPX", 104, 32, 14),
        _block_format("rocmfp3_mix", "Q3_1_ROCMFP3_MIX", 105, 32, 14),
        _block_format("rocmfp2_mix", "Q2_1_ROCMFP2_MIX", 106, 32, 10),
        _block_format("rocmfp2_s40", "Q2_0_ROCMFPX", ROCMFP2_TYPE_ID, 32, 10),
        _block_format("rocmfp2_m1012", "Q2_0_ROCMFP2", ROCMFP2_TYPE_ID, 32, 10),
        _block_format("rocmfp2_signed", "Q2_0_ROCMFP2", ROCMFP2_TYPE_ID, 32, 10),
        _block_format("rocmfp2_affine", "Q2_0_ROCMFP2", ROCMFP2_TYPE_ID, 32, 10),
        Format(
            name="hf_fp4_e2m1", ggml_name="I8 (FP4)", type_id=None,
            block=32, block_bytes=16, bits=4.25,
        ),
        Format(
            name="hf_fp8_e4m3_block128", ggml_name="F8_E4M3", type_id=None,
            block=1, block_bytes=1, bits=8 + 8 / 128**2,
        ),
    )
}  # fmt: skip
"""Every format `decode` knows, by name."""

ROCMFP2_READINGS: dict[Rocmfp2Reading, str] = {
    "s40": "rocmfp2_s40",
    "fixed": "rocmfp2_m1012",
    "signed": "rocmfp2_signed",
    "affine": "rocmfp2_affine",
}
"""Format name of each reading of type 107."""

_NAME_OF_TYPE = {
    f.type_id: f.name
    for f in FORMATS.values()
    if f.type_id is not None and f.type_id != ROCMFP2_TYPE_ID
}


def format_of_type(type_id: int, reading: Rocmfp2Reading | None = None) -> str | None:
    """Format name of a GGUF type id, or None for a type that only `decode_other` may know.

    Args:
        type_id: number in the tensor table.
        reading: needed for type 107, whose four writers disagree (see `guess_rocmfp2_reading`).

    Raises:
        ValueError: type 107 without a reading, or an unknown reading.
    """
    if type_id != ROCMFP2_TYPE_ID:
        return _NAME_OF_TYPE.get(type_id)
    if reading not in ROCMFP2_READINGS:
        raise ValueError(
            f"GGUF type 107 has four incompatible readings and {reading!r} names none of them:"
            f" choose one of {list(ROCMFP2_READINGS)}"
        )
    return ROCMFP2_READINGS[reading]


@dataclass(frozen=True)
class TypeLayout:
    """Storage of a GGUF type: its name, weights per block, bytes per block."""

    ggml_name: str
    block: int
    block_bytes: int


def type_layout(type_id: int) -> TypeLayout:
    """Storage layout of any GGUF type: ours, or one that the `gguf` package knows.

    Raises:
        ValueError: for a type id nobody knows, naming those that are known.
    """
    if type_id == ROCMFP2_TYPE_ID:
        return TypeLayout("Q2_0_ROCMFP2", 32, 10)
    name = _NAME_OF_TYPE.get(type_id)
    if name is not None:
        fmt = FORMATS[name]
        return TypeLayout(fmt.ggml_name, fmt.block, fmt.block_bytes)
    import gguf

    for known, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        if known.value == type_id:
            return TypeLayout(str(known.name), int(block), int(block_bytes))
    ids = sorted({*_NAME_OF_TYPE, ROCMFP2_TYPE_ID, *(int(t) for t in gguf.GGML_QUANT_SIZES)})
    raise ValueError(f"GGUF type {type_id} is unknown; known type ids are {ids}")


# Level and scale tables -------------------------------------------------------------------------


def _ue4m3_half() -> F32:
    byte = np.arange(256)
    exponent, mantissa = byte >> 3, byte & 7
    value = np.where(
        exponent == 0, np.ldexp(1.0, -10) * mantissa, np.ldexp(8.0 + mantissa, exponent - 11)
    )
    return np.where(byte > 0x7E, 0.0, value).astype(np.float32)


def _ue4m3_nvfp4() -> F32:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(
        exponent == 0, np.ldexp(1.0, -10) * mantissa, np.ldexp(8.0 + mantissa, exponent - 11)
    )
    return np.where(byte == 0x7F, 0.0, value).astype(np.float32)


def _e8m0(bias: int) -> F32:
    return np.ldexp(np.float32(1), np.minimum(np.arange(256) - bias, 127))


def _e4m3() -> F32:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(
        exponent == 0, np.ldexp(1.0, -9) * mantissa, np.ldexp(8.0 + mantissa, exponent - 10)
    )
    value = np.where(byte & 0x7F == 0x7F, np.nan, value)
    return np.where(byte & 0x80, -value, value).astype(np.float32)


def _signed(magnitudes: tuple[int, ...]) -> I8:
    """Levels of sign-magnitude codes: magnitudes, then their negatives."""
    return np.array(magnitudes + tuple(-m for m in magnitudes), np.int8)


def _grouped(levels: I8, width: int, codes: int) -> npt.NDArray[Any]:
    """Table from `codes` little-endian codes of `width` bits to their levels, as one integer."""
    word = np.arange(1 << width * codes)
    each = [levels[(word >> width * i) & ((1 << width) - 1)] for i in range(codes)]
    word_type = {2: np.uint16, 4: np.uint32}[codes]
    return np.ascontiguousarray(np.stack(each, axis=-1)).view(word_type)[:, 0]


def _per_nibble(levels: I8) -> tuple[I8, I8]:
    byte = np.arange(256)
    return levels[byte & 15], levels[byte >> 4]


SCALE_UE4M3 = _ue4m3_half()
"""float32[256]: value of a ROCmFP scale byte (half of E4M3), 0 for the invalid 0x7f..0xff."""

SCALE_NVFP4 = _ue4m3_nvfp4()
SCALE_MXFP4 = _e8m0(128)
SCALE_E8M0 = np.where(np.arange(256) == 255, np.nan, _e8m0(127)).astype(np.float32)
SCALE_E8M0_HALF = np.where(np.arange(256) == 255, np.nan, _e8m0(128)).astype(np.float32)
VALUE_E4M3 = _e4m3()

LEVELS_FP4 = _signed((0, 1, 2, 3, 4, 6, 8, 12))
"""int8[16]: doubled E2M1 values in code order (MXFP4, NVFP4, checkpoint FP4)."""
LEVELS_ROCMFP4 = _signed((0, 1, 2, 3, 4, 6, 8, 10))
"""int8[16]: levels of types 100 and 101 in code order."""
LEVELS_ROCMFP3 = _signed((0, 1, 2, 4))
"""int8[8]: levels of type 104 in code order."""
LEVELS_ROCMFP6 = np.array([*range(32), -32, *range(-1, -32, -1)], np.int8)
"""int8[64]: levels of type 102 in code order; code 32 is -32, as its own quantiser means it."""
LEVELS_S40 = np.array((-4, -1, 1, 4), np.int8)
LEVELS_FIXED = np.array((-1, 0, 1, 2), np.int8)

FP4_NIBBLES = _per_nibble(LEVELS_FP4)
ROCMFP4_NIBBLES = _per_nibble(LEVELS_ROCMFP4)
FP4_PAIRS = _grouped(LEVELS_FP4, 4, 2)
ROCMFP3_QUADS = _grouped(LEVELS_ROCMFP3, 3, 4)
ROCMFP6_PAIRS = _grouped(LEVELS_ROCMFP6, 6, 2)
S40_QUADS = _grouped(LEVELS_S40, 2, 4)
FIXED_QUADS = _grouped(LEVELS_FIXED, 2, 4)
CODE_QUADS = _grouped(np.arange(4, dtype=np.int8), 2, 4)

_IQ2_GRID_HEX = """
0000 0002 0005 0008 000a 0011 0014 0020 0022 0028 002a 0041 0044 0050 0058 0061
0064 0080 0082 008a 00a2 0101 0104 0110 0115 0140 0184 0198 0200 0202 0222 0282
0401 0404 0410 0421 0424 0440 0442 0448 0460 0481 0484 0490 04a4 0500 0502 0508
0520 0546 0569 0580 0591 0609 0610 0640 0684 06a4 0800 0805 0808 0814 0828 0841
0844 0850 0852 0888 0904 0940 0a02 0a14 1001 1004 1010 1021 1040 1060 1084 1090
1095 1100 1108 1120 1150 115a 1180 1224 1245 1400 1408 1420 1425 1449 1480 1518
1562 1600 1616 1801 1804 1810 1840 1881 1900 1905 19a0 1a51 2000 2002 200a 2044
2061 2080 2082 2129 2148 2200 2202 2401 2404 2410 2440 2456 2500 2541 2564 2690
2808 2820 2894 2a44 4001 4004 4010 4018 4021 4024 4040 4048 4056 4060 4081 4084
4090 4100 4120 4161 4180 4185 4201 4210 4248 4256 4268 4400 4408 4420 4480 4499
4512 4524 4600 4801 4804 4810 4840 4845 4900 4958 4961 4982 4a45 4a90 5000 5008
5011 5019 5020 5080 5088 5104 5142 51a4 5291 5490 5492 550a 5601 5654 5800 5811
5819 5864 5940 5a08 6004 6010 6040 6068 6100 6155 6218 6260 6400 6405 6510 6512
6584 6842 8000 8002 800a 8041 8082 8104 8118 8140 8211 8401 8404 8410 8415 8440
8460 8500 8546 8594 8609 8640 8660 8802 8904 8a11 9004 9010 9024 9040 90a1 9116
9180 9245 9400 9422 9444 9551 9881 9920 a002 a050 a085 a109 a200 a418 a850 a904
"""


def _iq2_grid() -> I8:
    entry = np.array([int(x, 16) for x in _IQ2_GRID_HEX.split()])
    grid: I8 = np.array((8, 25, 43), np.int8)[(entry[:, None] >> 2 * np.arange(8)) & 3]
    return grid


def _iq2_signs() -> I8:
    low = np.arange(128)
    bit = (low[:, None] >> np.arange(8)) & 1
    bit[:, 7] = bit.sum(axis=1) & 1
    return (1 - 2 * bit).astype(np.int8)


IQ2_GRID = _iq2_grid()
"""int8[256, 8]: magnitudes 8, 25, 43 of the IQ2_XXS grid."""
IQ2_SIGNS = _iq2_signs()
"""int8[128, 8]: signs of a seven-bit index; the eighth makes the number of minus signs even."""
